"""Strengths, error bars and problems where a column is from random probes.

Seeds of probes and networks here were not used to choose `LESS`, `COLUMN_NOISE` or `SKEW`.
"""

import pytest
import torch
from support.hessian import MIDDLE, SMALL, exact_trace, objective_of, target_of

import tacit
from tacit.errors import ProblemKind
from tacit.fitting.error_bars import layer_errors
from tacit.identifiability import compare
from tacit.regularizers import hessian_trace

NAME = "hessian_trace"
slow = pytest.mark.slow


def fits_over_seeds(target, objective, others=(), *, probes=16, seeds=range(30), **options):
    penalties = (hessian_trace(objective, probes, seed=seed) for seed in seeds)
    return [tacit.fit(target.equations([*others, p]), **options) for p in penalties]


def assert_agrees(fits, exact, *, within, least):
    """The mean strengths of fits are those of exact columns, and their intervals cover these."""
    for name, strength in exact.strengths.items():
        mean = sum(fit.strengths[name] for fit in fits) / len(fits)
        assert mean == pytest.approx(strength, rel=within)
        intervals = [fit.intervals()["probes"][name] for fit in fits]
        assert sum(low <= strength <= high for low, high in intervals) >= least * len(fits)


def attenuation(fits, strength):
    """The mean strength by plain least squares, over the right one."""
    plain = []
    for fit in fits:
        factor, count = fit.equations.noisy_factor(), len(fit.strengths)
        solution = torch.linalg.lstsq(factor[:, :count], factor[:, count:].mean(1, keepdim=True))
        plain.append(float(solution.solution[-1]))
    return sum(plain) / len(plain) / strength


@pytest.mark.parametrize(
    "groups", [pytest.param(1, id="exact target"), pytest.param(8, id="draws", marks=slow)]
)
def test_noise_of_16_probes_does_not_attenuate_strengths_and_intervals_cover(groups):
    """100 seeds, other networks and trajectories: benchmarks/probes.py."""
    objective, ridge = objective_of(900), [tacit.l2()]
    trace = exact_trace(objective)
    target = target_of([trace, *ridge], groups=groups)
    exact = tacit.fit(target.equations([*ridge, trace]))
    fits = fits_over_seeds(target, objective, ridge, seeds=range(5000, 5020))
    assert_agrees(fits, exact, within=0.08, least=0.9)
    assert attenuation(fits, exact.strengths[NAME]) < 0.85
    assert sum(bool(fit.problems) for fit in fits) <= 1


def test_noise_averages_over_the_steps_of_a_trajectory():
    objective = objective_of(901, (8, 8, 2))
    trace = exact_trace(objective)
    target = target_of([trace], points=4, mode="trajectory")
    exact = tacit.fit(target.equations(trace))
    fits = fits_over_seeds(target, objective, seeds=range(5100, 5105))
    assert_agrees(fits, exact, within=0.1, least=0.8)
    one = target_of([trace])
    alone = fits_over_seeds(one, objective, seeds=range(5100, 5105))
    errors = [sum(fit.standard_errors["probes"][NAME] for fit in some) for some in (fits, alone)]
    assert errors[0] < 0.75 * errors[1]


def test_a_column_that_is_mostly_noise_is_a_problem():
    objective = objective_of(902, (10, 10, 10, 2))
    target = target_of([exact_trace(objective)])
    for fit in fits_over_seeds(target, objective, probes=2, seeds=range(3)):
        (problem,) = [p for p in fit.problems if p.kind == ProblemKind.NOISY]
        assert "noise of its random probes" in problem.message
        assert abs(fit.strengths[NAME]) < 20 * attenuation([fit], 1)


def test_a_missing_part_is_unexplained_and_noise_of_probes_is_not():
    objective = objective_of(903, MIDDLE)
    trace = exact_trace(objective)
    well, badly = target_of([trace]), target_of([trace], missing=1.5)
    for target, expected in ((well, False), (badly, True)):
        for fit in fits_over_seeds(target, objective, probes=32, seeds=range(5200, 5203)):
            unexplained = any(p.kind == ProblemKind.UNEXPLAINED for p in fit.problems)
            assert unexplained == expected


def test_nonnegative_fits_have_the_same_error_bars_for_what_is_above_zero():
    objective = objective_of(904, SMALL)
    target = target_of([exact_trace(objective)])
    candidates = [hessian_trace(objective, 64), tacit.l2()]
    free = tacit.fit(target.equations(candidates[:1]))
    held = tacit.fit(target.equations(candidates), nonnegative=True)
    if held.strengths["l2"] == 0:
        assert held.strengths[NAME] == pytest.approx(free.strengths[NAME])
        assert held.standard_errors["probes"][NAME] == pytest.approx(
            free.standard_errors["probes"][NAME]
        )
    assert held.strengths[NAME] > 0


def test_leaving_out_a_layer_leaves_out_its_noise():
    """The jackknife over layers is that of fits without each layer."""
    objective = objective_of(905, (4, 6, 6, 2))
    target = target_of([exact_trace(objective)], missing=0.5)
    equations = target.equations(hessian_trace(objective, 256))
    whole = tacit.fit(equations).strengths[NAME]
    without = []
    for label in equations.layers:
        blocks = tuple(block for block in equations.blocks if block.layer != label)
        part = type(equations)(equations.families, equations.names, 1, blocks, equations.sources)
        without.append(tacit.fit(part).strengths[NAME])
    expected = 2 / 3 * sum((strength - whole) ** 2 for strength in without)
    bars = layer_errors(equations)
    assert float(bars.covariance[0, 0]) == pytest.approx(expected, rel=1e-6)


def test_comparison_takes_noise_out_of_what_is_held_out():
    objective = objective_of(906, MIDDLE)
    trace = exact_trace(objective)
    target = target_of([trace], points=3, mode="trajectory")
    exact, noisy = (
        compare(target.equations(penalty), {"it": [NAME]}, held_out="steps")
        for penalty in (trace, hessian_trace(objective, 64))
    )
    assert exact.explained["it"] > 0.999
    assert noisy.explained["it"] == pytest.approx(1, abs=0.03)


def test_scores_of_examples_know_the_column():
    objective = objective_of(907, SMALL, count=30)
    exact, probed = (
        tacit.score_examples(tacit.fit(tacit.endpoint_equations(objective, penalty)))
        for penalty in (hessian_trace(objective), hessian_trace(objective, 64))
    )
    errors = [
        scores.error_bars().standard_errors[NAME] / abs(scores.strengths[NAME])
        for scores in (exact, probed)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.3)
    assert not any("fixed" in note for note in exact.notes)


def test_the_summary_names_the_error_bars():
    objective = objective_of(908, SMALL)
    text = tacit.fit(
        target_of([exact_trace(objective)]).equations(hessian_trace(objective, 64))
    ).summary()
    assert "±probes" in text
    assert "8 groups of probes" in text


def test_steps_agree_on_a_missing_regularizer_and_not_on_noise_of_probes():
    objective = objective_of(909, SMALL)
    trace, ridge = exact_trace(objective), tacit.l2()
    target = target_of([trace, ridge], points=9, mode="trajectory")
    noisy = hessian_trace(objective, 16)
    (problem,) = tacit.fit(target.equations(noisy)).problems
    assert problem.kind == ProblemKind.UNEXPLAINED
    assert "Beside them, l2() has the strength" in problem.message
    both = tacit.fit(target.equations([ridge, noisy]))
    assert not both.problems
    errors = both.standard_errors
    assert errors["steps"]["hessian_trace"] == pytest.approx(
        errors["probes"]["hessian_trace"], rel=0.7
    )


def test_error_bars_are_the_first_order_effect_of_every_group():
    """λ solves (AᵀA − N)λ = Aᵀt; moving A by ε D_g, at fixed N, moves λ by ε z_g."""
    objective = objective_of(910, SMALL)
    regularizers = [tacit.l2(), hessian_trace(objective, 64)]
    target = target_of([exact_trace(objective)], missing=0.5)
    equations = target.equations(regularizers)
    fit, scatter = tacit.fit(equations), equations.scatter()
    (point,) = target.points
    columns = regularizers[1].bind(point.params)
    parts = {n: slice(0, p.numel()) for n, p in point.params.items()}
    deviations = torch.cat([columns.deviations(n, part)[:, :, 0] for n, part in parts.items()])
    t = torch.cat([v.flatten() for v in point.vectors[0].values()])
    gradients = [r.gradient(point.params)[r.name] for r in regularizers]
    A = torch.stack([torch.cat([g.flatten() for g in c.values()]) for c in gradients], dim=1)
    noise = torch.zeros(2, 2, dtype=torch.float64)
    noise[1, 1] = scatter.noise[0, 0]

    def strengths(design):
        return torch.linalg.solve(design.T @ design - noise, design.T @ t)

    torch.testing.assert_close(strengths(A), torch.tensor([*fit.strengths.values()]).double())
    moved, step = [], 1e-6
    for deviation in deviations.T:
        change = torch.stack([torch.zeros_like(deviation), deviation], dim=1)
        ahead, behind = (strengths(A + sign * step * change) for sign in (1, -1))
        moved.append((ahead - behind) / (2 * step))
    expected = torch.stack(moved).T @ torch.stack(moved) / (8 * 7)
    torch.testing.assert_close(fit.error_bars["probes"].covariance, expected, rtol=1e-4, atol=0)
