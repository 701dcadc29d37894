"""The bootstrap experiment: the paper's numbers, its units, and its figure."""

import json
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch

import tacit
from tacit_paper import bootstrap, load
from tacit_paper import least_squares as ls
from tacit_paper.bootstrap import PAPER, QUICK, Config
from tacit_paper.bootstrap_plot import crossover, crossovers

SMALL = Config(
    pools=2, endpoints=(1, 3, 6), shown=(1, 3, 6), sigmas=(1.0, 10.0), draws=2, draw_pools=1
)


@pytest.fixture(scope="module")
def rows():
    return pd.DataFrame(list(bootstrap.run(QUICK)))


def curve(rows, panel, series):
    return rows[(rows.panel == panel) & (rows.series == series)]


def test_every_key_number_holds(rows):
    found = bootstrap.check(rows)
    assert len(found) == 8
    assert all(check.holds for check in found), found
    assert all(type(check.value) is float and type(check.holds) is bool for check in found)


def test_the_pairs_bootstrap_as_published(rows):
    sweep = curve(rows, "F", "pairs").groupby("sigma").relative.mean()
    assert sweep[10] == pytest.approx(0.62, abs=0.1)
    assert sweep.is_monotonic_decreasing
    assert 5 < crossovers(rows)[0] < 7.5
    pools = curve(rows, "E", "pairs").groupby("m").relative
    assert pools.median()[100] == pytest.approx(0.62, abs=0.1)
    assert pools.median().idxmax() in range(8, 13)
    assert pools.median().max() > 3  # far above the baseline of 1


def test_the_residual_bootstrap_is_exact_once_determined(rows):
    exact = curve(rows, "E", "residual")
    assert exact[exact.m >= 11].relative.max() <= 1e-9
    assert exact[exact.m == 9].relative.min() > 0.2
    assert curve(rows, "F", "residual").relative.max() <= 1e-9
    assert set(exact[exact.m >= 10]["rank"]) == {55}


def test_forty_further_draws_cross_at_other_noise():
    config = replace(PAPER, draw_pools=1)
    others = [unit for unit in bootstrap.units(config) if not unit.startswith("draw")]
    found = pd.DataFrame(list(bootstrap.run(config, finished=others)))
    lines = found.groupby(["draw", "sigma"]).relative.mean().unstack()
    where = [crossover(list(lines.columns), list(line)) for line in lines.to_numpy()]
    assert len(where) == 40
    assert min(where) < 5.5
    assert max(where) > 10
    assert 6 < torch.tensor(where).median() < 10


@pytest.mark.parametrize("kind", ["pairs", "residual"])
def test_the_batched_estimate_is_the_library_s(kind):
    X, _, y = ls.draw(noise=10.0)
    config = replace(PAPER, endpoints=(20,))
    samples = bootstrap.resample(X, y[:, None], config, kind=kind, pool=1)
    at = bootstrap.endpoints(samples, config)
    for m in (1, 9, 10, 20):
        parts = [
            ls.equations(
                samples.X[b], samples.Y[b, :, 0], at.thetas[b, :, 0], tacit.regularizers.symmetric()
            )
            for b in range(m)
        ]
        slow = tacit.fit(tacit.stack(parts)).matrix()
        fast = bootstrap.estimate(at.thetas[:m, :, 0], at.gradients[:m, :, 0])
        assert (fast - slow).norm() <= 1e-9 * slow.norm()


def test_endpoints_are_those_of_plain_descent():
    X, _, y = ls.draw(noise=10.0)
    samples = bootstrap.resample(X, y[:, None], SMALL, kind="pairs", pool=0)
    thetas = bootstrap.endpoints(samples, SMALL).thetas
    for b in (0, 2):
        path = ls.descend(samples.X[b], samples.Y[b, :, 0], SMALL.step, SMALL.stop)
        assert (thetas[b, :, 0] - path.iterates[-1, :, 0]).norm() < 1e-12 * thetas[b].norm()
    assert torch.equal(samples.X[0], X)  # the data itself comes first
    rows = torch.randint(1000, (1000,), generator=torch.Generator().manual_seed(42 + 100 + 1))
    assert torch.equal(samples.X[1], X[rows])
    assert torch.equal(samples.Y[1, :, 0], y[rows])


def test_units_are_named_once_and_do_not_depend_on_each_other():
    names = bootstrap.units(SMALL)
    assert names == [
        "theory", "pairs pool 0", "pairs pool 1", "residual pool 0", "residual pool 1", "sigma 1",
        "sigma 10", "draw 1", "draw 2",
    ]  # fmt: skip
    whole = list(bootstrap.run(SMALL))
    some = {"pairs pool 1", "sigma 10", "draw 2"}
    part = list(bootstrap.run(SMALL, finished=[name for name in names if name not in some]))
    assert part == [row for row in whole if row["unit"] in some]
    assert {row["unit"] for row in whole} == set(names)
    assert list(bootstrap.run(SMALL, finished=names)) == []
    assert json.loads(json.dumps(whole)) == whole  # plain values


def test_threads_are_given_back():
    found = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        next(bootstrap.run(SMALL))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(found)


def test_the_figure_comes_from_stored_rows_alone(rows, tmp_path):
    rows.to_parquet(tmp_path / "rows.parquet")
    figure = bootstrap.plot(pd.read_parquet(tmp_path / "rows.parquet"))
    figure.savefig(tmp_path / "figure.png")
    titles = "".join(axis.get_title(loc="left")[:1] for axis in figure.get_axes())
    assert sorted(titles) == list("ABCDEF")
    assert (tmp_path / "figure.png").stat().st_size > 50_000


def test_it_is_an_experiment_like_the_others():
    module = load("bootstrap")
    assert module.TITLE
    assert "residual" in module.CAPTION
    assert "heavy-tailed" in module.CAPTION
    json.dumps([asdict(module.PAPER), asdict(module.QUICK)])


def test_a_crossover_is_interpolated_or_absent():
    assert crossover([1, 10, 100], [10.0, 1.0, 0.1]) == pytest.approx(10)
    assert crossover([1, 4], [2.0, 0.5]) == pytest.approx(2)
    assert crossover([1, 4], [0.5, 0.4]) != crossover([1, 4], [0.5, 0.4])  # NaN: never above
    assert crossover([1, 4], [3.0, 2.0]) != crossover([1, 4], [3.0, 2.0])  # NaN: never below
