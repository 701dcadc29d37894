"""The bootstrap figure: the paper's numbers, its units, and its drawing."""

import json
import math
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch
from support.experiments import run
from support.pages import ROOT

import tacit
from tacit_paper import bootstrap, find_experiment, read_text
from tacit_paper import least_squares as ls
from tacit_paper.bootstrap import PAPER, Config
from tacit_paper.bootstrap.checks import crossover
from tacit_paper.bootstrap.estimates import estimate_penalty
from tacit_paper.bootstrap.training import resample, train

SMALL = Config(
    pools=2, endpoints=(1, 3, 6), shown=(1, 3, 6), sigmas=(1.0, 10.0), draws=2, draw_pools=1,
    joined=(1, 2),
)  # fmt: skip


def test_forty_further_draws_cross_at_different_noise():
    config = replace(PAPER, draw_pools=1)
    other_units = [unit for unit in bootstrap.work(config, "cpu") if not unit.startswith("draw")]
    rows = pd.DataFrame(list(run(bootstrap, config, finished=other_units)))
    errors = rows.groupby(["draw", "sigma"]).relative.mean().unstack()
    sigmas = [crossover(list(errors.columns), list(draw)) for draw in errors.to_numpy()]
    assert len(sigmas) == 40
    assert min(sigmas) < 5.5
    assert max(sigmas) > 10
    assert 6 < torch.tensor(sigmas).median() < 10


@pytest.mark.parametrize("kind", ["pairs", "residual"])
def test_the_batched_estimate_equals_that_of_the_library(kind):
    X, _, y = ls.draw(noise=10.0)
    config = replace(PAPER, endpoints=(20,))
    samples = resample(X, y[:, None], config, kind=kind, pool=1)
    endpoints = train(samples, config)
    regularizer = tacit.regularizers.symmetric()
    for m in (1, 9, 10, 20):
        equations = [
            ls.equations(samples.X[b], samples.Y[b, :, 0], endpoints.thetas[b, :, 0], regularizer)
            for b in range(m)
        ]
        expected = tacit.fit(tacit.stack(equations)).matrix()
        batched = estimate_penalty(endpoints.thetas[:m, :, 0], endpoints.gradients[:m, :, 0])
        assert (batched - expected).norm() <= 1e-9 * expected.norm()


def test_joined_pools_are_stacked_endpoints_of_which_the_data_set_is_one():
    X, _, y = ls.draw(noise=SMALL.noise)
    regularizer = tacit.regularizers.symmetric()
    equations = []
    for pool in range(2):
        samples = resample(X, y[:, None], SMALL, kind="pairs", pool=pool)
        thetas = train(samples, SMALL).thetas[..., 0]
        for b in range(int(pool > 0), SMALL.size):
            equations.append(ls.equations(samples.X[b], samples.Y[b, :, 0], thetas[b], regularizer))
    *_, row = bootstrap.work(SMALL, "cpu")["joined pools"]()
    assert row["m"] == len(equations) == 11
    theory = tacit.theory.early_stopping(X, SMALL.step, SMALL.stop)
    expected = ls.relative_error(tacit.fit(tacit.stack(equations)).matrix(), theory)
    assert row["relative"] == pytest.approx(expected, rel=1e-6)


def test_claims_rest_on_their_rows():
    rows = pd.read_parquet(ROOT / "results/paper/bootstrap/rows.parquet")
    crossover_claim, floor, weakness, spread = bootstrap.CLAIMS
    assert all(claim.measure(rows).agrees for claim in bootstrap.CLAIMS)
    swapped = rows.replace({"series": {"pairs": "residual", "residual": "pairs"}})
    assert not any(claim.measure(swapped).agrees for claim in (crossover_claim, weakness, spread))
    falling = rows.copy()
    joined = falling.series == "joined"
    falling.loc[joined, "relative"] = 1000 / falling.m[joined]  # as if it went on for ever
    assert not floor.measure(falling).agrees
    earlier = rows.copy()
    earlier.loc[(earlier.series == "draw"), "relative"] /= 10
    assert not crossover_claim.measure(earlier).agrees


def test_batched_training_equals_plain_descent():
    X, _, y = ls.draw(noise=10.0)
    samples = resample(X, y[:, None], SMALL, kind="pairs", pool=0)
    thetas = train(samples, SMALL).thetas
    for b in (0, 2):
        descent = ls.descend(samples.X[b], samples.Y[b, :, 0], SMALL.step, SMALL.stop)
        assert (thetas[b, :, 0] - descent.iterates[-1, :, 0]).norm() < 1e-12 * thetas[b].norm()
    assert torch.equal(samples.X[0], X)  # the first is the data set itself
    drawn = torch.randint(1000, (1000,), generator=torch.Generator().manual_seed(42 + 100 + 1))
    assert torch.equal(samples.X[1], X[drawn])
    assert torch.equal(samples.Y[1, :, 0], y[drawn])


def test_units_have_unique_names_and_do_not_depend_on_each_other():
    names = list(bootstrap.work(SMALL, "cpu"))
    assert names == [
        "theory", "pairs pool 0", "pairs pool 1", "residual pool 0", "residual pool 1",
        "joined pools", "sigma 1", "sigma 10", "draw 1", "draw 2",
    ]  # fmt: skip
    rows = list(run(bootstrap, SMALL))
    chosen = {"pairs pool 1", "sigma 10", "draw 2"}
    finished = [name for name in names if name not in chosen]
    assert list(run(bootstrap, SMALL, finished=finished)) == [
        row for row in rows if row["unit"] in chosen
    ]
    assert {row["unit"] for row in rows} == set(names)
    assert list(run(bootstrap, SMALL, finished=names)) == []
    assert json.loads(json.dumps(rows)) == rows  # plain values


def test_the_number_of_threads_is_restored():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        next(run(bootstrap, SMALL))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_the_figure_is_drawn_only_from_stored_rows(tmp_path):
    pd.DataFrame(run(bootstrap, SMALL)).to_parquet(tmp_path / "rows.parquet")
    figure = bootstrap.plot(pd.read_parquet(tmp_path / "rows.parquet"))
    figure.savefig(tmp_path / "figure.png")
    titles = "".join(axis.get_title(loc="left")[:1] for axis in figure.get_axes())
    assert sorted(titles) == list("ABCDEF")
    assert (tmp_path / "figure.png").stat().st_size > 50_000


def test_the_experiment_has_a_caption_and_plain_configurations():
    experiment = find_experiment("bootstrap")
    title, *caption = read_text(experiment)
    assert title == "Bootstrap recovery of the early-stopped regularizer"
    assert [p.split()[0] for p in (caption[0], *caption[1])] == ["Training", "Which", "As"]
    assert len(caption[0].split()) <= 80
    assert "residual" in caption[1][0]
    assert "heavy-tailed" in caption[1][1]
    json.dumps([asdict(experiment.PAPER), asdict(experiment.QUICK)])


def test_a_crossover_is_interpolated_or_absent():
    assert crossover([1, 10, 100], [10.0, 1.0, 0.1]) == pytest.approx(10)
    assert crossover([1, 4], [2.0, 0.5]) == pytest.approx(2)
    assert math.isnan(crossover([1, 4], [0.5, 0.4]))  # never above
    assert math.isnan(crossover([1, 4], [3.0, 2.0]))  # never below
