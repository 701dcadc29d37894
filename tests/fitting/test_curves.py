"""Curves: known shapes are found without being named; bands, files, stacks and refusals."""

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from support.lasso import train_to_lasso_optimum
from support.models import load, minimise, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.equations import accumulated_target
from tacit.errors import InputError, ProblemKind
from tacit.fitting import ErrorBars
from tacit.regularizers import hypentropy, power, spectral_spline, spline

RIDGE, LASSO = 2e-3, 5e-3


@pytest.fixture(scope="module")
def lasso_network():
    """A tanh network at an exact optimum of L + RIDGE‖θ‖² + LASSO‖θ‖₁."""
    model, data = tanh_mlp(2, sizes=(6, 10, 1)), random_data(12, inputs=6)
    assert train_to_lasso_optimum(model, data, RIDGE, LASSO) < 1e-13
    return tacit.Objective(model, F.mse_loss, data)


@pytest.fixture(scope="module")
def ridge_network():
    """A tanh network at an optimum of L + 0.01‖θ‖²."""
    model, data = tanh_mlp(0), random_data(1)
    load(model, minimise(model, F.mse_loss, data, {tacit.l2(): 0.01}).params)
    return tacit.Objective(model, F.mse_loss, data)


def test_the_curve_of_an_exact_optimum_of_ridge_and_lasso_is_exact(lasso_network):
    zeros = sum(int((p == 0).sum()) for p in lasso_network.params.values())
    fit = tacit.fit(tacit.endpoint_equations(lasso_network, spline(10, even=True)))
    curve = fit.curve("spline")
    assert zeros > 30
    assert fit.rows == 81 - zeros
    assert not fit.problems
    for knot, strength in zip(curve.knots, fit.strengths.values(), strict=True):
        assert strength == pytest.approx(2 * RIDGE * knot + LASSO, abs=1e-9)
    for x, s, derivative in zip(curve.grid, curve.s, curve.derivative, strict=True):
        assert derivative == pytest.approx(2 * RIDGE * x + math.copysign(LASSO, x), abs=1e-9)
        assert s == pytest.approx(RIDGE * x**2 + LASSO * abs(x), abs=1e-9)
    assert sum(curve.counts) == fit.rows
    assert min(curve.grid) == -max(curve.grid)


def test_a_convex_curve_obeys_its_bounds_and_is_exact_where_the_truth_is_convex(lasso_network):
    fit = tacit.fit(tacit.endpoint_equations(lasso_network, spline(8, even=True, convex=True)))
    assert fit.strengths["spline[0]"] == pytest.approx(LASSO, abs=1e-9)
    assert fit.explained > 1 - 1e-12
    assert not fit.problems
    curve = fit.curve(grid=[-0.5, 0.5])
    assert curve.derivative == pytest.approx((-0.5 * 2 * RIDGE - LASSO, RIDGE + LASSO), abs=1e-9)


@pytest.mark.parametrize("even", [False, True])
def test_a_convex_fit_is_that_of_a_solver_with_bounds(even):
    """At random weights, where the best shape is not convex, beside another candidate."""
    model, data = tanh_mlp(2), random_data(3)
    target = tacit.endpoint_target(tacit.Objective(model, F.mse_loss, data))
    shape, params = spline(9, even=even, convex=True), params_of(model)
    fit = tacit.fit(target.equations([tacit.smooth_l1(0.05), shape]))
    free = tacit.fit(target.equations([tacit.smooth_l1(0.05), spline(9, even=even)]))

    knots = shape.bind(params).shape.knots
    columns = spline(knots, even=even).gradient(params).values()
    hats = np.stack([np.concatenate([c.flatten() for c in g.values()]) for g in columns], 1)
    beside = tacit.smooth_l1(0.05).gradient(params)["smooth_l1"].values()
    ramps = hats @ np.tril(np.ones((len(knots), len(knots))))
    design = np.column_stack([np.concatenate([c.flatten() for c in beside]), ramps])
    b = np.concatenate([v.flatten() for v in target.points[0].vectors[0].values()])
    lower = [-np.inf, 0.0 if even else -np.inf, *[0.0] * (len(knots) - 1)]
    expected = lsq_linear(design, b, (lower, [np.inf] * len(lower)), tol=1e-14).x

    np.testing.assert_allclose(list(fit.strengths.values()), expected, rtol=1e-4, atol=1e-7)
    assert 0.0 in fit.strengths.values()
    assert fit.explained < free.explained
    heights = np.array(fit.curve().derivative)[np.array(fit.curve().grid) > 0]
    assert (np.diff(heights) >= -1e-12).all()
    assert fit.unconstrained is not None
    assert not fit.nonnegative
    held = [n for n, s in fit.strengths.items() if s == 0 and n != "smooth_l1"]
    assert all(math.isnan(fit.standard_errors["layers"][n]) for n in held)
    assert fit.layers
    assert tacit.fitting.unique_shares(fit)["spline"] > 0


@cache
def diagonal_path(seed, size=200, examples=80, alpha=0.1, rate=2e-3):
    """The integral of −∇L over descent on β = u² − v² from u = v = α, for a dense teacher."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(examples, size, generator=generator, dtype=torch.float64)
    y = X @ torch.randn(size, 1, generator=generator, dtype=torch.float64)
    u = v = torch.full((size, 1), alpha, dtype=torch.float64)
    positions = []
    for _ in range(500):
        positions.append({"weight": (u * u - v * v).T})
        slope = 2 * X.T @ (X @ (u * u - v * v) - y) / examples
        u, v = u - 2 * rate * u * slope, v + 2 * rate * v * slope
    objective = tacit.Objective(nn.Linear(size, 1, bias=False).double(), F.mse_loss, (X, y))
    return accumulated_target(objective, tacit.Trajectory.from_positions(positions, rate))


@pytest.mark.parametrize("seed", [2000, 2001])
def test_the_potential_of_a_diagonal_network_is_found(seed):
    """¼·arcsinh(β/2α²), on seeds other than those that knots were chosen on."""
    target = diagonal_path(seed)
    fit = tacit.estimate(target, spline(even=True))
    either = tacit.estimate(target, spline())  # s′ up to a constant: it is taken from s′(0)
    for curve in (fit.curve(), either.curve()):
        law = [math.asinh(x / 0.02) / 4 for x in curve.grid]
        pairs = zip(curve.derivative, law, strict=True)
        assert max(abs(a - b) for a, b in pairs) <= 0.02 * max(law)
    assert not fit.problems
    assert fit.explained > 0.9999
    assert [p.kind for p in either.problems] == [ProblemKind.UNIDENTIFIED]
    assert tacit.estimate(target, tacit.l2()).explained <= 0.8


def test_curves_of_fixed_families_are_their_functions(ridge_network):
    candidates = {
        "l2": (tacit.l2(), lambda x: 2 * x),
        "smooth_l1": (tacit.smooth_l1(0.1), lambda x: max(-1, min(1, x / 0.1))),
        "power": (power(1.5), lambda x: 1.5 * math.copysign(abs(x) ** 0.5, x)),
        "hypentropy": (hypentropy(0.2), lambda x: math.asinh(x / 0.4)),
    }
    weights = torch.cat([p.flatten() for p in ridge_network.params.values()])
    for name, (regularizer, law) in candidates.items():
        fit = tacit.fit(tacit.endpoint_equations(ridge_network, regularizer))
        curve = fit.curve(name)
        expected = [fit.strengths[name] * law(x) for x in curve.grid]
        assert curve.derivative == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert (curve.grid[0], curve.grid[-1]) == (weights.min(), weights.max())
    with pytest.raises(InputError, match="has no curve"):
        tacit.fit(tacit.endpoint_equations(ridge_network, tacit.layerwise(tacit.l2()))).curve("l2")


def test_s_is_the_integral_of_its_derivative(ridge_network):
    for shape in (spline(5), spectral_spline(4)):
        fit = tacit.fit(tacit.endpoint_equations(ridge_network, shape))
        grid = torch.linspace(0, 0.6, 4001, dtype=torch.float64)
        curve = fit.curve(grid=grid.tolist())
        area = torch.cumulative_trapezoid(torch.tensor(curve.derivative).double(), grid)
        if curve.even:  # s′ jumps at zero, where the grid has 0
            area = area + 0.5 * grid[1] * curve.derivative[1]
        torch.testing.assert_close(torch.tensor(curve.s[1:]).double(), area, atol=1e-7, rtol=0)
        assert curve.s[0] == 0


def test_bands_are_those_of_linear_combinations(ridge_network):
    """Against the scatter of the curves of randomly drawn strengths."""
    fit = tacit.fit(tacit.endpoint_equations(ridge_network, spline(5)))
    generator = torch.Generator().manual_seed(0)
    draws = 0.01 * torch.randn(4000, 5, generator=generator, dtype=torch.float64)
    draws[:, 1] += 0.5 * draws[:, 0]
    bars = ErrorBars("sampling", "draws", tuple(fit.strengths), draws.T @ draws / len(draws))
    grid = [-0.5, -0.1, 0.3]
    curve = fit.with_error_bars(bars).curve(grid=grid)
    for field, center in (("s_intervals", curve.s), ("derivative_intervals", curve.derivative)):
        of_each = []  # the curve when one strength is 1 and the others are 0
        for name in fit.strengths:
            single = replace(fit, strengths={n: float(n == name) for n in fit.strengths})
            again = single.curve(grid=grid)
            of_each.append(again.s if field == "s_intervals" else again.derivative)
        errors = (draws.numpy() @ np.array(of_each)).std(0)
        for i, (low, high) in enumerate(getattr(curve, field)["sampling"]):
            assert (low + high) / 2 == pytest.approx(center[i])
            assert (high - low) / 2 == pytest.approx(1.96 * errors[i], rel=0.01)


def test_a_knot_without_weights_is_a_problem_and_not_a_number(ridge_network):
    knots = [-1.5, -0.5, 0, 0.5, 8, 9, 10]  # hats at 9 and 10 have no weights
    fit = tacit.fit(tacit.endpoint_equations(ridge_network, spline(knots)))
    assert ProblemKind.UNIDENTIFIED in [p.kind for p in fit.problems]
    curve = fit.curve(grid=[0.25, 8.5])
    assert math.isfinite(curve.derivative[0])
    assert math.isnan(curve.derivative[1])
    assert curve.to_dict()["derivative"][1] is None


def test_as_many_knots_as_weights_may_be_chance():
    model, data = nn.Linear(8, 1, bias=False).double(), random_data(4, inputs=8)
    fit = tacit.estimate(model, F.mse_loss, data, spline(24))
    assert fit.explained == pytest.approx(1)
    assert [p.kind for p in fit.problems] == [ProblemKind.WEAK]


def test_noise_is_not_a_curve():
    """A target without any shape: a random direction per knot would explain as much."""
    hidden = 0
    for seed in range(3000, 3010):
        model, data = tanh_mlp(seed), random_data(seed)
        target = tacit.endpoint_target(tacit.Objective(model, F.mse_loss, data))
        generator = torch.Generator().manual_seed(seed)
        noise = {n: torch.randn(p.shape, generator=generator).double() for n, p in
                 params_of(model).items()}  # fmt: skip
        point = replace(target.points[0], vectors=[noise])
        fit = tacit.fit(replace(target, points=(point,)).equations(spline(6)))
        hidden += not any(p.kind == ProblemKind.WEAK for p in fit.problems)
    assert hidden <= 1


def test_saved_equations_still_have_their_curve(ridge_network, tmp_path):
    equations = tacit.endpoint_equations(ridge_network, [spline(5, even=True, convex=True)])
    equations.save(tmp_path / "equations")
    loaded = tacit.Equations.load(tmp_path / "equations")
    assert loaded.families == equations.families
    curve, expected = (tacit.fit(e).curve() for e in (loaded, equations))
    assert curve == expected
    assert curve.counts == expected.counts != ()
    assert json.loads(json.dumps(curve.to_dict()))["knots"] == list(curve.knots)
    single = tacit.endpoint_equations(ridge_network, tacit.l2())
    with pytest.raises(InputError, match="has no curve"):
        tacit.fit(replace(single, origin=None)).curve("l2")


def test_endpoints_stack_only_with_the_same_knots(ridge_network):
    moved = {n: 1.1 * p for n, p in ridge_network.params.items()}
    shape = spline(5)
    first, second = (
        tacit.endpoint_equations(ridge_network, shape, params=p)
        for p in (ridge_network.params, moved)
    )
    curve = tacit.fit(tacit.stack([first, second])).curve()
    assert curve.knots == tacit.fit(first).curve().knots
    assert sum(curve.counts) == 2 * sum(p.numel() for p in moved.values())
    other = tacit.endpoint_equations(ridge_network, spline(5), params=moved)
    with pytest.raises(InputError, match="same spline object"):
        tacit.stack([first, other])
    even = tacit.endpoint_equations(ridge_network, spline(5, even=True))
    with pytest.raises(InputError, match="knots"):
        tacit.stack([first, even])


def test_retraining_uses_the_knots_of_the_fit(ridge_network):
    """s′ = 0.02 x is the spline of ridge: retraining from elsewhere returns to the optimum."""
    shape = spline(6)
    fit = tacit.fit(tacit.endpoint_equations(ridge_network, shape))
    point = {n: p.detach().clone().requires_grad_() for n, p in ridge_network.params.items()}
    value = tacit.validation.penalty([shape], fit)(point)
    slopes = torch.autograd.grad(value, list(point.values()))
    for slope, p in zip(slopes, point.values(), strict=True):
        torch.testing.assert_close(slope, 0.02 * p.detach(), rtol=1e-4, atol=1e-6)
    moved = {n: p.detach() + 0.3 for n, p in point.items()}
    with pytest.raises(InputError, match="spline"):
        tacit.validation.penalty([spline(6)], fit)(moved)


def test_a_plot_shows_the_curve_its_band_and_the_weights(ridge_network, tmp_path):
    fit = tacit.fit(tacit.endpoint_equations(ridge_network, spline(6, even=True)))
    fit = fit.with_error_bars(tacit.score_examples(fit).error_bars())
    for curve, panels in ((fit.curve(), 4), (replace(fit.curve(), counts=()), 2)):
        figure = curve.plot()
        assert [axes.get_ylabel() for axes in figure.get_axes()[:2]] == ["s", "s′"]
        assert len(figure.get_axes()) == panels
        lines = [axes.get_lines()[-1].get_ydata() for axes in figure.get_axes()[:2]]
        sides = [i for i, x in enumerate(curve.grid) if x >= 0]
        assert list(lines[0]) == [curve.s[i] for i in sides]
        assert list(lines[1]) == [curve.derivative[i] for i in sides]
        figure.savefig(tmp_path / "curve.png")
        assert (tmp_path / "curve.png").stat().st_size > 5_000
    with pytest.raises(InputError, match="kind is 'steps'"):
        curve.plot("steps")


def test_strengths_of_zero_or_above_are_for_even_shapes_only(ridge_network):
    target = tacit.endpoint_target(ridge_network)
    fit = tacit.fit(target.equations(spline(5, even=True)), nonnegative=True)
    assert min(fit.strengths.values()) >= 0
    for convex in (False, True):
        equations = target.equations(spline(5, convex=convex))
        with pytest.raises(InputError, match="not even"):
            tacit.fit(equations, nonnegative=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "l3"}, "'l3'"),
        ({"grid": []}, "grid is"),
        ({"grid": [math.nan]}, "grid is"),
        ({"grid": "ab"}, "grid is ab"),
    ],
)
def test_bad_calls_are_explained(ridge_network, arguments, words):
    fit = tacit.fit(tacit.endpoint_equations(ridge_network, [tacit.l2(), spline(3)]))
    with pytest.raises(InputError, match=words):
        fit.curve(**arguments)


def kinked_path(scale, steps=60):
    """Descent on a linear map with ridge and smooth L1, from weights of this scale."""
    generator = torch.Generator().manual_seed(5)
    X = torch.randn(60, 12, generator=generator, dtype=torch.float64)
    y = X @ torch.randn(12, 6, generator=generator, dtype=torch.float64)
    model = nn.Linear(12, 6, bias=False).double()
    w = scale * torch.randn(6, 12, generator=generator, dtype=torch.float64)
    objective, positions = tacit.Objective(model, F.mse_loss, (X, y)), []
    for _ in range(steps):
        positions.append({"weight": w})
        slope = objective.gradient({"weight": w})["weight"]
        w = w - 0.5 * (slope + 0.02 * w + 0.05 * (w / 0.3).clamp(-1, 1))
    return objective, tacit.Trajectory.from_positions(positions, 0.5)


@pytest.mark.parametrize(("scale", "even"), [(0.0, True), (0.02, False), (3.0, False)])
def test_knots_of_a_trajectory_are_those_of_the_weights_of_all_steps(scale, even):
    objective, path = kinked_path(scale)
    for target in (None, tacit.trajectory_target(objective, path)):
        shape = spline(32, even=even)
        equations = (
            tacit.trajectory_equations(objective, path, shape)
            if target is None
            else target.equations(shape)
        )
        fit = tacit.fit(equations)
        ends = [path.points[i]["weight"] for i in (0, -1)]
        assert fit.curve().knots[-1] >= max(float(w.abs().max() if even else w.max()) for w in ends)
        assert fit.explained > 0.999
        curve = fit.curve(grid=[-1.0, -0.5, 0.5, 1.0])
        law = [0.02 * x + 0.05 * max(-1, min(1, x / 0.3)) for x in curve.grid]
        assert curve.derivative == pytest.approx(law, rel=0.03)


def test_weights_beyond_the_knots_are_a_finding(ridge_network):
    target = tacit.endpoint_target(ridge_network)
    narrow = tacit.fit(target.equations(spline([-0.1, 0, 0.1])))
    (finding,) = narrow.findings
    beyond = sum(int((p.abs() > 0.1).sum()) for p in ridge_network.params.values())
    assert f"{beyond} of {narrow.rows} weights lie beyond the outermost knots" in finding
    assert not tacit.fit(target.equations(spline(5))).findings


@pytest.mark.parametrize("convex", [False, True])
def test_differences_of_a_path_have_bands_and_values_at_every_point(convex):
    """What a path leaves open, a constant in s′, is in no band of s′ − s′(0)."""
    knots = [-2, -1, -0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1, 2]
    shape = spline(knots, convex=convex)
    fit = tacit.fit(tacit.stack([diagonal_path(seed).equations(shape) for seed in (2000, 2001, 5)]))
    curve = fit.curve(grid=[-1.0, -0.1, 1e-17, 0.1, 1.0])
    assert all(map(math.isfinite, curve.s + curve.derivative))
    pairs = zip(curve.derivative, curve.derivative_intervals["training"], strict=True)
    for value, (low, high) in pairs:
        assert low <= value <= high <= value + 0.1
    assert [p.kind for p in fit.problems] == [ProblemKind.UNIDENTIFIED]
    parts = [
        tacit.fit(tacit.stack([diagonal_path(s).equations(shape) for s in pair])).curve(grid=[1.0])
        for pair in ((2000, 2001), (2000, 5), (2001, 5))
    ]  # leaving one run out moves the curve: the jackknife by definition
    moved = sum((part.derivative[0] - curve.derivative[-1]) ** 2 for part in parts)
    low, high = curve.derivative_intervals["training"][-1]
    at_least = 4.3026  # of t with two degrees of freedom, or fewer where runs are unequal
    assert (high - low) / 2 >= 0.999 * at_least * math.sqrt(2 / 3 * moved)


def test_a_layer_does_not_count_the_weights_of_others(ridge_network):
    fit = tacit.fit(tacit.endpoint_equations(ridge_network, spline([-0.2, 0.2])))
    for label, part in fit.layers.items():
        curve = part.curve()
        assert curve.counts == (), label
        curve.plot()
        assert not part.findings


def test_the_first_line_of_a_summary_names_the_curve_and_not_all_its_knots(ridge_network):
    fit = tacit.fit(tacit.endpoint_equations(ridge_network, [tacit.smooth_l1(0.1), spline(12)]))
    assert fit.summary().startswith("smooth_l1 and spline (12 knots) explain 100.0 %")
    alone = tacit.fit(tacit.endpoint_equations(ridge_network, spline(12)))
    assert alone.summary().startswith("spline (12 knots) explains 100.0 %")


def test_weights_without_equations_are_not_counted(ridge_network):
    """With rows= of one layer the others are no evidence; in a stack all sources must count."""
    target, shape = tacit.endpoint_target(ridge_network), spline([-0.2, 0.2])
    part, whole = target.equations(shape, rows="0.*"), target.equations(shape)
    assert tacit.fit(part).curve().counts == ()
    assert sum(tacit.fit(whole).curve().counts) == whole.rows
    assert tacit.fit(tacit.stack([part, whole])).curve().counts == ()
