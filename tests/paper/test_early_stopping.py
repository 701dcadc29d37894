"""Early stopping in least squares: the exact penalty, its estimates, and the figure."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.experiments import run
from support.models import random_data

from tacit import InputError, theory
from tacit_paper import early_stopping as experiment
from tacit_paper import least_squares as ls

PAPER = experiment.PAPER
STEPS = (1, 10, 100, 500, 1000)


def rows_of(config, *prefixes):
    """The rows of the units whose names begin with one of the prefixes."""
    skipped = [unit for unit in experiment.work(config, "cpu") if not unit.startswith(prefixes)]
    return pd.DataFrame(run(experiment, config, finished=skipped))


@pytest.fixture(scope="module")
def quick():
    """All units at a size that is enough for drawing."""
    config = replace(
        experiment.QUICK, pools=2, datasets=6, datasets_per_unit=3, endpoints=(1, 9, 10, 12),
        cap=600, adam_epochs=200,
    )  # fmt: skip
    return config, pd.DataFrame(run(experiment, config))


# The exact penalty Λ(t).


@pytest.mark.parametrize("t", STEPS)
def test_the_minimiser_under_the_exact_penalty_is_the_iterate(t):
    X, _, y = ls.draw()
    minimiser = ls.penalised_solution(X, y, theory.early_stopping(X, 0.01, t))
    assert ls.relative_error(minimiser, ls.descend(X, y, 0.01, t).iterates[t, :, 0]) <= 1e-12
    # torch's mse_loss with the same rate takes steps twice as long, which has another penalty.
    doubled = ls.descend(X, y, 0.02, t).iterates[t, :, 0]
    assert ls.relative_error(minimiser, doubled) > 1e-5
    minimiser = ls.penalised_solution(X, y, theory.early_stopping(X, 0.02, t))
    assert ls.relative_error(minimiser, doubled) <= 1e-12


def test_a_step_is_half_of_torchs_on_the_mean_squared_error():
    X, _, y = ls.draw()
    theta = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([theta], lr=0.005)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(X @ theta, y).backward()
        optimizer.step()
    descent = ls.descend(X, y, 0.01, 20)
    assert ls.relative_error(descent.iterates[20, :, 0], theta.detach()) <= 1e-13
    assert float(descent.losses[0, 0]) == pytest.approx(float(y.square().mean()), rel=1e-12)


def test_the_exact_penalty_equals_the_naive_formula():
    X, _, _ = ls.draw()
    gram, eye = X.T @ X / len(X), torch.eye(10, dtype=torch.float64)
    for t in (1, 7, 500):
        power = torch.linalg.matrix_power(torch.linalg.inv(eye - 0.01 * gram), t)
        naive = gram @ torch.linalg.inv(power - eye)
        assert ls.relative_error(theory.early_stopping(X, 0.01, t), naive) <= 1e-10


def test_the_exact_penalty_has_its_published_size_and_the_wrong_step_is_far_off():
    X, _, _ = ls.draw()
    penalty = theory.early_stopping(X, 0.01, 500)
    assert float(penalty.norm()) == pytest.approx(0.02610, abs=5e-6)
    assert float(penalty.trace()) / 10 == pytest.approx(0.007615, abs=5e-7)
    doubled_step = theory.early_stopping(X, 0.02, 500)
    ratios = torch.linalg.eigvalsh(penalty) / torch.linalg.eigvalsh(doubled_step)
    assert ratios.min() > 60  # each is e^a + 1 with a ≈ ηst, so it is large in every direction


def test_flow_is_the_limit_of_small_steps():
    X, _, _ = ls.draw()
    flow = theory.early_stopping_flow(X, 5.0)
    gaps = [
        ls.relative_error(theory.early_stopping(X, 5.0 / t, t), flow) for t in (500, 5000, 50_000)
    ]
    assert gaps[2] < 1e-3
    assert gaps[0] / gaps[1] == pytest.approx(10, rel=0.1)
    assert gaps[1] / gaps[2] == pytest.approx(10, rel=0.1)


def test_directions_without_data_have_the_limit_one_over_time():
    X = random_data(0, count=3, inputs=5)[0]
    null = torch.linalg.svd(X).Vh[3:]
    for penalty in (theory.early_stopping(X, 0.01, 50), theory.early_stopping_flow(X, 0.5)):
        torch.testing.assert_close(null @ penalty @ null.T, torch.eye(2).double() / 0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda X: theory.early_stopping(X, 0.0, 5), "above 0"),
        (lambda X: theory.early_stopping(X, 0.01, 0), "above 0"),
        (lambda X: theory.early_stopping(X, float("nan"), 5), "above 0"),
        (lambda X: theory.early_stopping(X, 10.0, 5), "largest eigenvalue"),
        (lambda X: theory.early_stopping(X[:, 0], 0.01, 5), "shape"),
        (lambda X: theory.early_stopping(X[:0], 0.01, 5), "shape"),
        (lambda X: theory.early_stopping(X * float("inf"), 0.01, 5), "finite"),
        (lambda X: theory.early_stopping_flow(X, -1.0), "above 0"),
        (lambda X: theory.early_stopping_flow(X[0], 1.0), "shape"),
    ],
)
def test_the_exact_penalty_refuses_wrong_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call(ls.draw().X)


# Descent and stopping.


def test_an_integer_weight_equals_repeating_the_example():
    X, y = random_data(1, count=20, inputs=3)
    counts = torch.tensor([0, 2] * 10)
    repeated = torch.repeat_interleave(torch.arange(20), counts)
    weighted = ls.descend(X, y, 0.1, 30, weights=counts[:, None])
    expected = ls.descend(X[repeated], y[repeated], 0.1, 30)
    torch.testing.assert_close(weighted.iterates, expected.iterates)
    torch.testing.assert_close(weighted.losses, expected.losses)


def test_each_column_descends_as_it_would_separately():
    X, _, _ = ls.draw()
    Y = ls.draw_pool(X, 2, 3)
    together = ls.descend(X, Y, 0.01, 50)
    for k in range(3):
        separate = ls.descend(X, ls.redraw(X, 56 + 100 + 20_000 + k)[1], 0.01, 50)
        torch.testing.assert_close(together.iterates[:, :, k], separate.iterates[:, :, 0])


def test_stopping_waits_for_patience_and_counts_improvements_from_the_best():
    losses = torch.tensor([[5.0, 5.0], [4.0, 4.9], [4.0, 4.8], [3.9, 4.7], [3.95, 4.6], [3.9, 4.5]])
    assert ls.stopping_times(losses, patience=2, min_delta=0.0) == [5, 5]
    assert ls.stopping_times(losses, patience=1, min_delta=0.0) == [2, 5]
    assert ls.stopping_times(losses, patience=3, min_delta=0.15) == [4, 5]
    assert ls.stopping_times(losses, patience=2, min_delta=0.25) == [3, 2]


# What the key numbers of the quick reproduction do not show.


def test_a_diagonal_from_one_endpoint_retrains_and_is_often_no_penalty():
    rows = rows_of(PAPER, "datasets", "diagonal")
    datasets = rows[rows.series == "dataset"]
    assert len(datasets) == 200
    has_minimum = datasets.least_eigenvalue > 0
    assert datasets[has_minimum].value.max() <= 1e-12
    assert abs((datasets.least_entry < 0).mean() - 0.77) <= 0.08
    assert 0 < (~has_minimum).sum() <= 10
    verdicts = has_minimum.map({True: "strongly convex", False: "unbounded"})
    assert (datasets.verdict == verdicts).all()
    values = {name: series.value.to_numpy() for name, series in rows.groupby("series")}
    assert values["retrained"] == pytest.approx(values["early-stopped"], rel=1e-11)
    assert abs(values["true"] - values["retrained"]).max() < 0.2


def test_the_scalar_is_the_rayleigh_quotient_and_falls_below_the_trace():
    scalar = rows_of(replace(PAPER, checkpoints=(100, 500, 1000)), "trace").set_index("t")
    assert (scalar.value / scalar.rayleigh - 1).abs().max() <= 1e-9
    ratio = (scalar.value / scalar["trace"])[[100, 500, 1000]]
    assert ratio.tolist() == pytest.approx([0.98, 0.895, 0.81], abs=0.005)
    assert (scalar.adam / scalar.value - 1).abs().max() <= 1e-6
    assert (scalar.adam_epochs <= PAPER.adam_epochs).all()
    assert (scalar.adam_seconds > scalar.exact_seconds).mean() > 0.5


# The contract of every figure.


def test_a_subset_of_units_gives_the_same_rows(quick):
    config, rows = quick
    units = list(experiment.work(config, "cpu"))
    assert list(rows.unit.unique()) == units
    chosen = ["datasets from 3", "fixed pool 1", "variable pool 1", "trace"]
    subset = pd.DataFrame(run(experiment, config, finished=set(units) - set(chosen)))
    assert list(subset.unit.unique()) == chosen
    expected = rows[rows.unit.isin(chosen)].reset_index(drop=True)
    columns = [
        name for name in rows.columns if name in subset.columns and not name.endswith("_seconds")
    ]
    pd.testing.assert_frame_equal(subset[columns], expected[columns], check_dtype=False)


def test_the_figure_is_drawn_only_from_stored_rows(quick, tmp_path):
    _, rows = quick
    rows.to_parquet(tmp_path / "rows.parquet")
    figure = experiment.plot(pd.read_parquet(tmp_path / "rows.parquet"))
    figure.savefig(tmp_path / "figure.png")
    titles = [axis.get_title(loc="left") for axis in figure.get_axes()]
    letters = [title.split("  ")[0] for title in titles if "  " in title]
    assert letters == ["A", "B", "B′", "C", "C′", "D", "E"]


def test_presets_differ_only_in_sizes():
    quick, paper = experiment.QUICK, experiment.PAPER
    sizes = ("pools", "datasets", "endpoints", "checkpoints")
    assert replace(quick, **{name: getattr(paper, name) for name in sizes}) == paper
    assert set(quick.endpoints) >= {1, 9, 10, 100}


# What the paper says, beside the stored rows.


@pytest.fixture(scope="module")
def stored_rows():
    """The stored rows of the paper's size."""
    root = Path(__file__).parents[2]
    return pd.read_parquet(root / "results" / "paper" / "early-stopping" / "rows.parquet")


def evidence_by_measure(rows):
    return {claim.measure.__name__: claim.measure(rows) for claim in experiment.CLAIMS}


def set_values(panel, series, change):
    """A change of rows: other values in one series."""

    def changed(rows):
        chosen = (rows.panel == panel) & (rows.series == series)
        return rows.assign(value=rows.value.where(~chosen, change(rows)))

    return changed


CHANGES = {
    "measure_identity": set_values("identity", "half-MSE step", lambda rows: 1e-3),
    "measure_exact_recovery": set_values("B", "float64", lambda rows: 1e-6),
    "measure_same_weights": set_values("C", "dataset", lambda rows: 1e-3),
    "measure_diagonals": set_values("C", "estimate", lambda rows: 0.0075),
    "measure_steepness": set_values("D", "min_delta", lambda rows: 1e-14),
    "measure_richer_signal": set_values("D", "min_delta", lambda rows: rows.value / 100),
    "measure_tight_match": set_values("E", "scalar", lambda rows: rows["trace"]),
    "measure_decay": set_values("E", "scalar", lambda rows: 1.0),
}
"""By claim, a change of rows that refutes its verdict."""


def test_stored_rows_agree_with_all_verdicts(stored_rows):
    assert {claim.measure.__name__ for claim in experiment.CLAIMS} == set(CHANGES)
    for evidence in evidence_by_measure(stored_rows).values():
        assert evidence.agrees is True, evidence.text
        assert "nan" not in evidence.text
    assert all(number.holds for number in experiment.check(stored_rows))


@pytest.mark.parametrize("name", CHANGES)
def test_changed_rows_disagree_with_the_verdict(name, stored_rows):
    assert not evidence_by_measure(CHANGES[name](stored_rows))[name].agrees
