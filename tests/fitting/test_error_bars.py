"""Error bars: intervals, closed forms, dense formulas, and coverage."""

import math
from itertools import pairwise

import pytest
import torch
from support.models import random_data, tanh_mlp
from support.systems import equations_of_parts
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.fitting.error_bars import (
    ErrorBars,
    draw_errors,
    error_bars_from,
    jackknife,
    layer_errors,
    source_errors,
    step_errors,
)
from tacit_paper.coverage.naive import naive_errors

COVARIANCE = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))

TRUTH = (1.0, -0.5)
"""Strengths in the simulations of coverage."""


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def least_squares(rows, count):
    """Strengths of dense rows [design | targets]."""
    return torch.linalg.lstsq(rows[:, :count], rows[:, count:].mean(1, keepdim=True)).solution[:, 0]


def dense_jackknife(clusters, count):
    """The covariance from refits without each cluster."""
    whole = least_squares(torch.cat(clusters), count)
    deviations = torch.stack([
        least_squares(torch.cat([c for c in clusters if c is not left_out]), count) - whole
        for left_out in clusters
    ])  # fmt: skip
    return (len(clusters) - 1) / len(clusters) * deviations.T @ deviations


def assert_close(actual, expected, rtol=1e-9):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-14)


def test_equal_clusters_of_one_strength_give_the_variance_of_a_mean():
    strengths = torch.tensor([1.0, 2.0, 4.0, 7.0], dtype=torch.float64)
    parts = torch.stack([torch.ones(4, dtype=torch.float64), strengths], dim=1)[:, None]
    bars = jackknife(parts, ["r0"], kind="layers", basis="4 layers")
    assert bars is not None
    assert bars.standard_errors["r0"] == pytest.approx(float(strengths.std()) / 2, rel=1e-12)
    assert bars.freedom == pytest.approx(3, rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_layers_and_sources_agree_with_the_dense_jackknife(seed):
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.arange(-3, 3)
    parts = [
        (f"layer{i}", j, 0, randn(generator, 5 + 7 * i, 4) * scales[i])
        for j in range(5)
        for i in range(4)
    ]
    system = equations_of_parts(parts, 3)
    for bars, key in ((layer_errors(system), 0), (source_errors(system), 1)):
        labels = dict.fromkeys(part[key] for part in parts)
        clusters = [torch.cat([p[3] for p in parts if p[key] == label]) for label in labels]
        assert bars is not None
        assert_close(bars.covariance, dense_jackknife(clusters, 3))
    by_kind = error_bars_from(system, torch.zeros(3).double())
    assert {kind: bars.basis for kind, bars in by_kind.items()} == {
        "training": "5 endpoints",
        "layers": "4 layers",
    }


def test_degrees_of_freedom_equal_those_of_the_dense_quadratic_form():
    """Satterthwaite's, from the dense quadratic form Σ_g (λ₍₋g₎ − λ̂)² of independent rows."""
    generator = torch.Generator().manual_seed(4)
    clusters = [randn(generator, rows, 2) for rows in (3, 5, 8, 40)]
    design = torch.cat([c[:, :1] for c in clusters])
    starts = [0, 3, 8, 16, 56]
    forms = []
    for first, last in pairwise(starts):
        others = design.clone()
        others[first:last] = 0
        forms.append(others / others.square().sum() - design / design.square().sum())
    form = torch.cat(forms, dim=1)
    eigenvalues = torch.linalg.eigvalsh(form.T @ form)
    expected = eigenvalues.sum() ** 2 / eigenvalues.square().sum()
    bars = layer_errors(equations_of_parts([(f"l{i}", 0, 0, c) for i, c in enumerate(clusters)], 1))
    assert bars is not None
    assert bars.freedom == pytest.approx(float(expected), rel=1e-9)
    assert 1 < bars.freedom < 3


def test_a_strength_of_one_layer_is_undetermined_and_the_others_are_unaffected():
    generator = torch.Generator().manual_seed(5)
    clusters = [randn(generator, 12, 4) for _ in range(5)]
    clusters[0][:, 2] = 0
    for rows in clusters[1:]:
        rows[:, 1] = 0  # only layer 0 determines r1
    bars = layer_errors(
        equations_of_parts([(f"l{i}", 0, 0, rows) for i, rows in enumerate(clusters)], 3)
    )
    assert bars is not None
    errors = bars.standard_errors
    assert math.isinf(errors["r1"])
    assert bars.intervals({"r0": 1.0, "r1": 1.0, "r2": 1.0})["r1"] == (-math.inf, math.inf)
    deviations = []
    for left_out in range(5):
        others = torch.cat([rows for i, rows in enumerate(clusters) if i != left_out])
        deviations.append(torch.linalg.pinv(others[:, :3]) @ others[:, 3])
    deviations = torch.stack(deviations) - least_squares(torch.cat(clusters), 3)
    for column in (0, 2):
        expected = (4 / 5 * deviations[:, column].square().sum()).sqrt()
        assert errors[f"r{column}"] == pytest.approx(float(expected), rel=1e-9)
    assert math.isfinite(bars.freedom)


def test_layers_do_not_determine_the_errors_of_layerwise_strengths():
    objective = tacit.Objective(tanh_mlp(0, (5, 6, 4, 1)), F.mse_loss, random_data(0))
    system = tacit.endpoint_equations(objective, [tacit.layerwise(tacit.l2())])
    bars = layer_errors(system)
    assert bars is not None
    assert all(math.isinf(error) for error in bars.standard_errors.values())


def test_one_cluster_has_no_error_bars():
    generator = torch.Generator().manual_seed(6)
    system = equations_of_parts([("only", 0, 0, randn(generator, 30, 3))], 2)
    assert error_bars_from(system, torch.zeros(2).double()) == {}


def test_draws_agree_with_fits_of_every_group():
    generator = torch.Generator().manual_seed(7)
    rows = randn(generator, 50, 3 + 5)
    bars = draw_errors(equations_of_parts([("l", 0, 0, rows)], 3))
    assert bars is not None
    strengths = torch.linalg.lstsq(rows[:, :3], rows[:, 3:]).solution
    assert_close(bars.covariance, torch.cov(strengths) / 5)
    assert (bars.freedom, bars.basis) == (4.0, "5 groups of draws")


def test_steps_agree_with_the_dense_cosine_sums():
    generator = torch.Generator().manual_seed(8)
    rows = [randn(generator, 6, 3) for _ in range(20)]
    strengths = least_squares(torch.cat(rows), 2)
    parts = [(f"l{i}", 0, t, r[3 * i : 3 * i + 3]) for t, r in enumerate(rows) for i in range(2)]
    bars = step_errors(equations_of_parts(parts, 2, mode="trajectory"), strengths)
    assert bars is not None
    gram = sum(r[:, :2].T @ r[:, :2] for r in rows)
    influences = torch.stack(
        [torch.linalg.solve(gram, r[:, :2].T @ (r[:, 2] - r[:, :2] @ strengths)) for r in rows]
    )
    cosine_sums = [
        sum(
            influences[t] * math.sqrt(2) * math.cos(math.pi * j * (t + 0.5) / 20) for t in range(20)
        )
        for j in (1, 2, 3)
    ]
    assert_close(bars.covariance, 20 / 18 * sum(torch.outer(w, w) for w in cosine_sums) / 3)
    assert bars.freedom == pytest.approx(3)


def test_variances_of_two_trajectories_add_up_and_short_ones_have_none():
    generator = torch.Generator().manual_seed(9)
    trajectories = [[randn(generator, 4, 2) for _ in range(count)] for count in (12, 30)]
    parts = [("l", i, t, r) for i, steps in enumerate(trajectories) for t, r in enumerate(steps)]
    system = equations_of_parts(parts, 1, mode="trajectory")
    strengths = least_squares(torch.cat([part[3] for part in parts]), 1)
    bars, total = step_errors(system, strengths), 0.0
    whole = sum(r[:, 0].square().sum() for steps in trajectories for r in steps)
    for steps in trajectories:
        single = step_errors(
            equations_of_parts([("l", 0, t, r) for t, r in enumerate(steps)], 1), strengths
        )
        assert single is not None
        length = len(steps)
        part = sum(r[:, 0].square().sum() for r in steps) / whole
        total += float(single.covariance * (length - 1) / length * part**2) * 42 / 41
    assert bars is not None
    assert float(bars.covariance) == pytest.approx(total, rel=1e-9)
    assert 2 < bars.freedom <= 6
    assert bars.basis == "42 steps of 2 trajectories"
    assert step_errors(equations_of_parts(parts[:7], 1), strengths) is None


def test_naive_errors_are_those_of_ordinary_least_squares():
    generator = torch.Generator().manual_seed(10)
    rows = randn(generator, 40, 3)
    strengths = least_squares(rows, 2)
    variance = (rows[:, 2] - rows[:, :2] @ strengths).square().sum() / 38
    expected = (variance * torch.linalg.inv(rows[:, :2].T @ rows[:, :2]).diagonal()).sqrt()
    parts = [("a", 0, 0, rows[:25]), ("b", 0, 0, rows[25:])]
    assert list(naive_errors(equations_of_parts(parts, 2)).values()) == pytest.approx(
        expected.tolist()
    )


def test_strengths_at_zero_have_no_error_bars_and_do_not_affect_the_others():
    generator = torch.Generator().manual_seed(11)
    rows = [randn(generator, 12, 4) for _ in range(5)]
    for part in rows:
        part[:, 3] += 2 * part[:, 0] - 3 * part[:, 1] + part[:, 2]
    system = equations_of_parts([(f"l{i}", 0, 0, part) for i, part in enumerate(rows)], 3)
    strengths = torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64)
    bars = error_bars_from(system, strengths, nonnegative=True)["layers"]
    without = layer_errors(system.select_columns([0, 2]))
    assert without is not None
    assert torch.isnan(bars.covariance[1]).all()
    assert_close(bars.covariance[[0, 2]][:, [0, 2]], without.covariance)
    assert (bars.freedoms[0], bars.freedoms[2]) == without.freedoms
    low, _ = bars.intervals({"r0": 2.0, "r1": 0.0, "r2": 1.0})["r1"]
    assert math.isnan(low)
    assert error_bars_from(system, 0 * strengths, nonnegative=True) == {}


def test_epochs_stacked_with_an_endpoint_keep_their_allowance():
    X, y = random_data(4, count=64)
    torch.manual_seed(0)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.2)
    averages = tacit.average_epochs(model, optimizer, epochs=6)
    for _ in range(40):
        for batch in torch.randperm(64).split(8):
            optimizer.zero_grad()
            F.mse_loss(model(X[batch]), y[batch]).backward()
            optimizer.step()
        averages.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    epochs = averages.equations(objective, tacit.l2())
    stacked = tacit.stack([epochs, tacit.endpoint_equations(objective, tacit.l2())])
    bars = tacit.fit(stacked).error_bars["training"]
    assert "allowance" in bars.basis
    assert bars.measured


def intervals_cover(bars, strengths, truth):
    """Which of the nominal 95 % intervals contain the truth."""
    assert bars is not None
    intervals = bars.intervals(dict(zip(bars.names, strengths.tolist(), strict=True)))
    return [
        low <= value <= high for (low, high), value in zip(intervals.values(), truth, strict=True)
    ]


def simulate_layers(generator, sizes, spread):
    """Whether intervals cover, for layers with noisy rows or with different strengths."""
    parts = []
    for size in sizes:
        design = randn(generator, size, 2)
        strengths = torch.tensor(TRUTH).double() + spread * randn(generator, 2)
        target = design @ strengths + (0 if spread else 1) * randn(generator, size)
        parts.append(torch.cat([design, target[:, None]], dim=1))
    system = equations_of_parts([(f"l{i}", 0, 0, rows) for i, rows in enumerate(parts)], 2)
    return intervals_cover(layer_errors(system), least_squares(torch.cat(parts), 2), TRUTH)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.3], ids=["rows", "strengths"])
@pytest.mark.parametrize(
    ("sizes", "most"), [([40] * 4, 0.98), ([40] * 10, 0.98), ([10, 20, 40, 160], 1.0)], ids=str
)
def test_intervals_from_layers_cover_the_truth(sizes, spread, most):
    generator = torch.Generator().manual_seed(20)
    hits = [hit for _ in range(400) for hit in simulate_layers(generator, sizes, spread)]
    assert 0.92 < sum(hits) / len(hits) <= most


def test_intervals_from_draws_cover_the_truth():
    generator = torch.Generator().manual_seed(21)
    hits = []
    for _ in range(500):
        design, mix = randn(generator, 30, 2), randn(generator, 30, 30)
        targets = (design @ torch.tensor(TRUTH).double())[:, None] + mix @ randn(generator, 30, 8)
        rows = torch.cat([design, targets], dim=1)
        hits += intervals_cover(
            draw_errors(equations_of_parts([("l", 0, 0, rows)], 2)), least_squares(rows, 2), TRUTH
        )
    assert 0.93 < sum(hits) / len(hits) < 0.97


def simulate_steps(generator, count, phi):
    """Whether intervals cover, for a trajectory with AR(1) noise from step to step."""
    noise = [randn(generator, 6) / math.sqrt(1 - phi**2)]
    shape = randn(generator, 6, 2)  # the design changes slowly, as weights do
    parts = []
    for step in range(count):
        design = shape * (1 + 0.3 * math.sin(step / 10))
        target = design @ torch.tensor(TRUTH).double() + noise[-1]
        parts.append(torch.cat([design, target[:, None]], dim=1))
        noise.append(phi * noise[-1] + randn(generator, 6))
    system = equations_of_parts([("l", 0, step, rows) for step, rows in enumerate(parts)], 2)
    strengths = least_squares(torch.cat(parts), 2)
    return intervals_cover(step_errors(system, strengths), strengths, TRUTH)


@pytest.mark.slow
@pytest.mark.parametrize("phi", [0.0, 0.5])
@pytest.mark.parametrize(("count", "runs"), [(50, 300), (200, 100)])
def test_intervals_from_steps_cover_the_truth(count, runs, phi):
    generator = torch.Generator().manual_seed(22)
    hits = [hit for _ in range(runs) for hit in simulate_steps(generator, count, phi)]
    assert 0.90 <= sum(hits) / len(hits) <= 0.98


def test_intervals_use_the_t_distribution_of_each_strength():
    bars = ErrorBars("draws", "8 groups", ("a", "b"), COVARIANCE, 2.0, (7.0, 2.0))
    intervals = bars.intervals({"a": 0.0, "b": 1.0})
    assert intervals["a"][1] == pytest.approx(2.3646243, rel=1e-7)  # tables of t
    assert intervals["b"] == pytest.approx((1 - 2 * 4.3026527, 1 + 2 * 4.3026527), rel=1e-7)
    normal = ErrorBars("draws", "8 groups", ("a", "b"), COVARIANCE)
    assert normal.quantile() == pytest.approx(1.9599640, rel=1e-7)


def test_wrong_levels_covariances_and_degrees_of_freedom_are_refused():
    bars = ErrorBars("draws", "8 groups", ("a", "b"), COVARIANCE)
    with pytest.raises(tacit.InputError, match=r"level is 95.*such as 0\.95"):
        bars.intervals({"a": 0.0, "b": 1.0}, 95)  # pyright: ignore[reportArgumentType]
    with pytest.raises(tacit.InputError, match=r"covariance of shape \(2, 2\) for 1 strengths"):
        ErrorBars("draws", "8 groups", ("a",), COVARIANCE)
    with pytest.raises(tacit.InputError, match="1 degrees of freedom for 2 strengths"):
        ErrorBars("draws", "8 groups", ("a", "b"), COVARIANCE, 1.0, (1.0,))
