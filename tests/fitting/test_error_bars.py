"""Error bars from the equations alone: closed forms, dense oracles, and how often they cover."""

import math
from itertools import pairwise

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit.equations.equations import Block, Equations, Family, Source, triangular_factor
from tacit.fitting.disagreement import (
    error_bars_from,
    jackknife,
    draw_errors,
    layer_errors,
    source_errors,
    step_errors,
)
from tacit.fitting.error_bars import ErrorBars
from tacit_paper.coverage.naive import naive_errors


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def source(mode):
    return Source(mode, "loss", 1, 1, 1, 0, 0, "float64", 1.0, 1.0)


def equations(parts, count, *, mode="endpoint"):
    """Equations from (layer, source, step, [design | targets]); columns of zeros are left out."""
    blocks = []
    for layer, place, step, rows in parts:
        columns = tuple(torch.nonzero(rows[:, :count].norm(dim=0))[:, 0].tolist())
        held = torch.cat([rows[:, list(columns)], rows[:, count:]], dim=1)
        blocks.append(
            Block(layer, columns, triangular_factor(held), len(rows), 0, 0.0, place, step)
        )
    names = tuple(f"r{i}" for i in range(count))
    sources = tuple(source(mode) for _ in range(1 + max(part[1] for part in parts)))
    families = tuple(Family(name, "", 1) for name in names)
    return Equations(families, names, parts[0][3].shape[1] - count, tuple(blocks), sources)


def solve(rows, count):
    return torch.linalg.lstsq(rows[:, :count], rows[:, count:].mean(1, keepdim=True)).solution[:, 0]


def left_out(clusters, count):
    """The dense jackknife: refit without each cluster."""
    whole = solve(torch.cat(clusters), count)
    moved = torch.stack([
        solve(torch.cat([c for c in clusters if c is not gone]), count) - whole
        for gone in clusters
    ])  # fmt: skip
    return (len(clusters) - 1) / len(clusters) * moved.T @ moved


def close(a, b, rtol=1e-9):
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-14)


def test_equal_clusters_of_one_strength_give_the_variance_of_a_mean():
    found = torch.tensor([1.0, 2.0, 4.0, 7.0], dtype=torch.float64)
    parts = torch.stack([torch.ones(4, dtype=torch.float64), found], dim=1)[:, None]
    bars = jackknife(parts, ["r0"], kind="layers", basis="4 layers")
    assert bars is not None
    assert bars.standard_errors["r0"] == pytest.approx(float(found.std()) / 2, rel=1e-12)
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
    found = equations(parts, 3)
    for bars, key in ((layer_errors(found), 0), (source_errors(found), 1)):
        labels = dict.fromkeys(part[key] for part in parts)
        clusters = [torch.cat([p[3] for p in parts if p[key] == label]) for label in labels]
        assert bars is not None
        close(bars.covariance, left_out(clusters, 3))
    told = error_bars_from(found, torch.zeros(3).double())
    assert {kind: bars.basis for kind, bars in told.items()} == {
        "training": "5 endpoints",
        "layers": "4 layers",
    }


def test_freedom_is_that_of_the_quadratic_form():
    """Satterthwaite by the dense quadratic form Σ_g (λ₍₋g₎ − λ̂)² of independent rows."""
    generator = torch.Generator().manual_seed(4)
    clusters = [randn(generator, rows, 2) for rows in (3, 5, 8, 40)]
    design = torch.cat([c[:, :1] for c in clusters])
    starts = [0, 3, 8, 16, 56]
    forms = []
    for first, last in pairwise(starts):
        rest = design.clone()
        rest[first:last] = 0
        forms.append(rest / rest.square().sum() - design / design.square().sum())
    form = torch.cat(forms, dim=1)
    squares = torch.linalg.eigvalsh(form.T @ form)
    wanted = squares.sum() ** 2 / squares.square().sum()
    bars = layer_errors(equations([(f"l{i}", 0, 0, c) for i, c in enumerate(clusters)], 1))
    assert bars is not None
    assert bars.freedom == pytest.approx(float(wanted), rel=1e-9)
    assert 1 < bars.freedom < 3


def test_a_strength_of_one_layer_is_undetermined_and_the_others_keep_their_bars():
    generator = torch.Generator().manual_seed(5)
    dense = [randn(generator, 12, 4) for _ in range(5)]
    dense[0][:, 2] = 0
    for rows in dense[1:]:
        rows[:, 1] = 0  # r1 lives in layer 0 alone
    bars = layer_errors(equations([(f"l{i}", 0, 0, rows) for i, rows in enumerate(dense)], 3))
    assert bars is not None
    errors = bars.standard_errors
    assert math.isinf(errors["r1"])
    assert bars.intervals({"r0": 1.0, "r1": 1.0, "r2": 1.0})["r1"] == (-math.inf, math.inf)
    moved = []
    for gone in range(5):
        rest = torch.cat([rows for i, rows in enumerate(dense) if i != gone])
        moved.append(torch.linalg.pinv(rest[:, :3]) @ rest[:, 3])
    moved = torch.stack(moved) - solve(torch.cat(dense), 3)
    for column in (0, 2):
        wanted = (4 / 5 * moved[:, column].square().sum()).sqrt()
        assert errors[f"r{column}"] == pytest.approx(float(wanted), rel=1e-9)
    assert math.isfinite(bars.freedom)


def test_layerwise_strengths_have_no_bars_from_layers():
    objective = tacit.Objective(tanh_mlp(0, (5, 6, 4, 1)), F.mse_loss, random_data(0))
    found = tacit.endpoint_equations(objective, [tacit.layerwise(tacit.l2())])
    bars = layer_errors(found)
    assert bars is not None
    assert all(math.isinf(error) for error in bars.standard_errors.values())


def test_one_cluster_has_no_error_bars():
    generator = torch.Generator().manual_seed(6)
    found = equations([("only", 0, 0, randn(generator, 30, 3))], 2)
    assert error_bars_from(found, torch.zeros(2).double()) == {}


def test_draws_agree_with_fits_of_every_group():
    generator = torch.Generator().manual_seed(7)
    rows = randn(generator, 50, 3 + 5)
    bars = draw_errors(equations([("l", 0, 0, rows)], 3))
    assert bars is not None
    found = torch.linalg.lstsq(rows[:, :3], rows[:, 3:]).solution
    close(bars.covariance, torch.cov(found) / 5)
    assert (bars.freedom, bars.basis) == (4.0, "5 groups of draws")


def test_steps_agree_with_the_dense_cosine_sums():
    generator = torch.Generator().manual_seed(8)
    rows = [randn(generator, 6, 3) for _ in range(20)]
    lam = solve(torch.cat(rows), 2)
    parts = [(f"l{i}", 0, t, r[3 * i : 3 * i + 3]) for t, r in enumerate(rows) for i in range(2)]
    bars = step_errors(equations(parts, 2, mode="trajectory"), lam)
    assert bars is not None
    gram = sum(r[:, :2].T @ r[:, :2] for r in rows)
    psi = torch.stack(
        [torch.linalg.solve(gram, r[:, :2].T @ (r[:, 2] - r[:, :2] @ lam)) for r in rows]
    )
    waves = [
        sum(psi[t] * math.sqrt(2) * math.cos(math.pi * j * (t + 0.5) / 20) for t in range(20))
        for j in (1, 2, 3)
    ]
    close(bars.covariance, 20 / 18 * sum(torch.outer(w, w) for w in waves) / 3)
    assert bars.freedom == pytest.approx(3)


def test_steps_of_two_trajectories_add_up_and_short_ones_have_none():
    generator = torch.Generator().manual_seed(9)
    rows = [[randn(generator, 4, 2) for _ in range(count)] for count in (12, 30)]
    parts = [("l", i, t, r) for i, own in enumerate(rows) for t, r in enumerate(own)]
    both = equations(parts, 1, mode="trajectory")
    lam = solve(torch.cat([part[3] for part in parts]), 1)
    bars, total = step_errors(both, lam), 0.0
    size = sum(r[:, 0].square().sum() for own in rows for r in own)
    for own in rows:
        alone = step_errors(equations([("l", 0, t, r) for t, r in enumerate(own)], 1), lam)
        assert alone is not None
        length = len(own)
        part = sum(r[:, 0].square().sum() for r in own) / size
        total += float(alone.covariance * (length - 1) / length * part**2) * 42 / 41
    assert bars is not None
    assert float(bars.covariance) == pytest.approx(total, rel=1e-9)
    assert 2 < bars.freedom <= 6
    assert bars.basis == "42 steps of 2 trajectories"
    assert step_errors(equations(parts[:7], 1), lam) is None


def test_naive_errors_are_those_of_ordinary_least_squares():
    generator = torch.Generator().manual_seed(10)
    rows = randn(generator, 40, 3)
    lam = solve(rows, 2)
    variance = (rows[:, 2] - rows[:, :2] @ lam).square().sum() / 38
    wanted = (variance * torch.linalg.inv(rows[:, :2].T @ rows[:, :2]).diagonal()).sqrt()
    parts = [("a", 0, 0, rows[:25]), ("b", 0, 0, rows[25:])]
    assert list(naive_errors(equations(parts, 2)).values()) == pytest.approx(wanted.tolist())


def test_strengths_held_at_zero_have_no_bars_and_the_others_are_as_without_them():
    generator = torch.Generator().manual_seed(11)
    rows = [randn(generator, 12, 4) for _ in range(5)]
    for part in rows:
        part[:, 3] += 2 * part[:, 0] - 3 * part[:, 1] + part[:, 2]
    system = equations([(f"l{i}", 0, 0, part) for i, part in enumerate(rows)], 3)
    strengths = torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64)
    bars = error_bars_from(system, strengths, nonnegative=True)["layers"]
    alone = layer_errors(system.only([0, 2]))
    assert alone is not None
    assert torch.isnan(bars.covariance[1]).all()
    close(bars.covariance[[0, 2]][:, [0, 2]], alone.covariance)
    assert (bars.freedoms[0], bars.freedoms[2]) == alone.freedoms
    low, _ = bars.intervals({"r0": 2.0, "r1": 0.0, "r2": 1.0})["r1"]
    assert math.isnan(low)
    assert error_bars_from(system, 0 * strengths, nonnegative=True) == {}


def test_intervals_use_t_of_each_strength():
    covariance = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    bars = ErrorBars("draws", "8 groups", ("a", "b"), covariance, 2.0, (7.0, 2.0))
    found = bars.intervals({"a": 0.0, "b": 1.0})
    assert found["a"][1] == pytest.approx(2.3646243, rel=1e-7)  # tables of t
    assert found["b"] == pytest.approx((1 - 2 * 4.3026527, 1 + 2 * 4.3026527), rel=1e-7)
    normal = ErrorBars("draws", "8 groups", ("a", "b"), covariance)
    assert normal.quantile() == pytest.approx(1.9599640, rel=1e-7)
    with pytest.raises(tacit.InputError, match=r"level is 95.*such as 0\.95"):
        bars.intervals({"a": 0.0, "b": 1.0}, 95)  # pyright: ignore[reportArgumentType]
    with pytest.raises(tacit.InputError, match=r"covariance of shape \(2, 2\) for 1 strengths"):
        ErrorBars("draws", "8 groups", ("a",), covariance)
    with pytest.raises(tacit.InputError, match="1 degrees of freedom for 2 strengths"):
        ErrorBars("draws", "8 groups", ("a", "b"), covariance, 1.0, (1.0,))


def covered(bars, strengths, truth):
    """Which of the nominal 95 % intervals hold the truth."""
    assert bars is not None
    found = bars.intervals(dict(zip(bars.names, strengths.tolist(), strict=True)))
    return [low <= value <= high for (low, high), value in zip(found.values(), truth, strict=True)]


TRUTH = (1.0, -0.5)


def layers_once(generator, sizes, spread):
    """Layers with rows of noise, and strengths of their own around the truth."""
    parts = []
    for size in sizes:
        design = randn(generator, size, 2)
        own = torch.tensor(TRUTH).double() + spread * randn(generator, 2)
        target = design @ own + (0 if spread else 1) * randn(generator, size)
        parts.append(torch.cat([design, target[:, None]], dim=1))
    system = equations([(f"l{i}", 0, 0, rows) for i, rows in enumerate(parts)], 2)
    return covered(layer_errors(system), solve(torch.cat(parts), 2), TRUTH)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.3], ids=["rows", "strengths"])
@pytest.mark.parametrize(
    ("sizes", "most"), [([40] * 4, 0.98), ([40] * 10, 0.98), ([10, 20, 40, 160], 1.0)], ids=str
)
def test_intervals_from_layers_cover(sizes, spread, most):
    generator = torch.Generator().manual_seed(20)
    hits = [hit for _ in range(400) for hit in layers_once(generator, sizes, spread)]
    assert 0.92 < sum(hits) / len(hits) <= most


def test_intervals_from_draws_cover():
    generator = torch.Generator().manual_seed(21)
    hits = []
    for _ in range(500):
        design, mix = randn(generator, 30, 2), randn(generator, 30, 30)
        targets = (design @ torch.tensor(TRUTH).double())[:, None] + mix @ randn(generator, 30, 8)
        rows = torch.cat([design, targets], dim=1)
        hits += covered(draw_errors(equations([("l", 0, 0, rows)], 2)), solve(rows, 2), TRUTH)
    assert 0.93 < sum(hits) / len(hits) < 0.97


def steps_once(generator, count, phi):
    """A trajectory whose rows carry noise that is an AR(1) from step to step."""
    noise = [randn(generator, 6) / math.sqrt(1 - phi**2)]
    shape = randn(generator, 6, 2)  # the design moves slowly, as weights do
    parts = []
    for step in range(count):
        design = shape * (1 + 0.3 * math.sin(step / 10))
        target = design @ torch.tensor(TRUTH).double() + noise[-1]
        parts.append(torch.cat([design, target[:, None]], dim=1))
        noise.append(phi * noise[-1] + randn(generator, 6))
    system = equations([("l", 0, step, rows) for step, rows in enumerate(parts)], 2)
    strengths = solve(torch.cat(parts), 2)
    return covered(step_errors(system, strengths), strengths, TRUTH)


@pytest.mark.slow
@pytest.mark.parametrize("phi", [0.0, 0.5])
@pytest.mark.parametrize(("count", "runs"), [(50, 300), (200, 100)])
def test_intervals_from_steps_cover(count, runs, phi):
    generator = torch.Generator().manual_seed(22)
    hits = [hit for _ in range(runs) for hit in steps_once(generator, count, phi)]
    assert 0.90 <= sum(hits) / len(hits) <= 0.98
