"""How probably a random direction would explain as much as a column, against its distribution."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from scipy import stats
from support.models import minimise, random_data, tanh_mlp
from support.partly_trained import partly_trained, random_direction
from support.systems import draw, equations, reports
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.equations.blocks import Block
from tacit.fitting.chance import chance, chances
from tacit.fitting.shares import unique_shares
from tacit.fitting.solving import System


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "others"), [(3, 0), (10, 0), (10, 3), (200, 2)])
def test_a_random_direction_adds_a_beta_distributed_fraction_for_any_target(rows, others):
    """Beta(½, (p − k)/2) of what the others leave; p-values are then uniform."""
    beside, target = draw(100, rows, others) ** 3, draw(101, rows).exp()
    rest = 1 - reference.explained(beside, reference.fit(beside, target), target) if others else 1
    distribution = stats.beta(0.5, (rows - others - 1) / 2)
    fractions, p_values = [], []
    for seed in range(250):
        system = equations(torch.cat([beside, draw(7000 + seed, rows, 1)], dim=1), target)
        p_values.append(chance(system)[f"r{others}"])
        fractions.append(unique_shares(system)[f"r{others}"] / rest)
        assert p_values[-1] == pytest.approx(distribution.sf(fractions[-1]), abs=1e-6)
    assert stats.kstest(fractions, distribution.cdf).pvalue > 0.01
    assert stats.kstest(p_values, "uniform").pvalue > 0.01


def two_layers(design, target, split):
    """Equations of two layers; the last column is zero in the second."""
    whole = equations(design, target)
    rows, last = torch.cat([design, target[:, None]], dim=1), design.shape[1] - 1
    columns = tuple(range(last + 1))
    second = rows[split:][:, [*columns[:-1], last + 1]]
    blocks = (
        Block("a", columns, rows[:split], split, 0, 0.0),
        Block("b", columns[:-1], second, len(second), 0, 0.0),
    )
    return replace(whole, blocks=blocks)


@pytest.mark.parametrize("split", [4, 15])
def test_a_column_of_some_layers_is_compared_with_directions_in_those_layers(split):
    """The distribution of the ratio of quadratic forms, against draws and as a p-value."""
    beside, target = draw(102, 30, 2), draw(103, 30)
    beside[:split] *= 2
    p_values = []
    for seed in range(500):
        column = draw(8000 + seed, 30, 1)
        column[split:] = 0
        system = two_layers(torch.cat([beside, column], dim=1), target, split)
        p_values.append(chance(system)["r2"])
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    rest = target - beside @ reference.fit(beside, target)
    basis = torch.linalg.qr(beside).Q

    def added(columns):
        outside = columns.square().sum(-1) - (columns @ basis).square().sum(-1)
        return (columns @ rest).square() / outside

    drawn = draw(104, 40_000, 30)
    drawn[:, split:] = 0
    column = torch.zeros(30).double()
    column[:split] = draw(105, split)
    system = two_layers(torch.cat([beside, column[:, None]], dim=1), target, split)
    expected = float((added(drawn) >= added(column)).double().mean())
    assert chance(system)["r2"] == pytest.approx(expected, abs=0.01)


def test_exact_idle_and_collinear_columns():
    design, target = draw(5, 10, 2), draw(6, 10)
    exact = equations(design, design @ torch.tensor([1.0, 1e-6]).double())
    assert max(chance(exact).values()) < 1e-20
    assert chance(equations(design, design[:, 0]))["r1"] == 1  # it adds nothing
    # Any two columns solve two equations.
    assert min(chance(equations(design[:2], target[:2])).values()) > 0.99
    twins = equations(design[:, [0, 0, 1]], target)
    assert [chance(twins)[name] for name in ("r0", "r1")] == [1, 1]
    assert chance(twins)["r2"] == pytest.approx(chance(equations(design, target))["r1"])
    assert chance(equations(design, 0 * target)) == {"r0": 1, "r1": 1}
    huge = replace(exact, blocks=tuple(replace(b, rows=10**9) for b in exact.blocks))
    assert max(chance(huge).values()) == 0
    assert chances(exact, System(design), target, []) == {}


def test_strengths_held_at_zero_have_p_value_one_and_do_not_affect_the_others():
    design = draw(1, 60, 3)
    target = design @ torch.tensor([1.0, -0.5, 0.3]).double() + 0.3 * draw(2, 60)
    fit = tacit.fit(equations(design, target), nonnegative=True)
    assert chance(fit)["r1"] == 1
    assert chance(fit)["r0"] == pytest.approx(chance(equations(design[:, [0, 2]], target))["r0"])


@cache
def with_random_directions(seed):
    """Equations of a network with ridge, smooth L1 and 50 random directions."""
    families = [random_direction(f"random {i}", 1000 * seed + i) for i in range(50)]
    candidates = [tacit.l2(), tacit.smooth_l1(1e-1), *families]
    return tacit.endpoint_equations(partly_trained(seed), candidates)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [(), ("l2",), ("l2", "smooth_l1")], ids=len)
def test_a_random_direction_is_reported_as_chance_in_99_of_100_trials(beside):
    """400 trials on 8 networks; an alarm is a fit that does not report chance."""
    alarms, trials = 0, 0
    for seed in range(400, 408):
        system = with_random_directions(seed)
        others = [system.names.index(name) for name in beside]
        for name in system.names[2:]:
            fit = tacit.fit(system.select_columns([*others, system.names.index(name)]))
            alarms += not reports(fit, "chance_in_residual", name) and not reports(fit, "rounding")
            trials += 1
    assert trials == 400
    assert alarms <= 10  # 4 are expected; 20 would be 5 %


@pytest.mark.parametrize("scope", ["0", "*.weight"])
def test_a_random_direction_in_a_scope_is_reported_as_chance_too(scope):
    alarms = 0
    for seed in range(430, 434):
        families = [random_direction(f"random {i}", 1000 * seed + i, scope) for i in range(50)]
        system = tacit.endpoint_equations(partly_trained(seed), [tacit.l2(), *families])
        for index in range(1, 51):
            fit = tacit.fit(system.select_columns([0, index]))
            alarms += not reports(fit, "chance_in_residual", system.names[index])
    assert alarms <= 7  # of 200


def test_penalties_that_were_applied_are_not_reported_as_chance():
    """Neither at the optimum nor near it."""
    model, data = tanh_mlp(0), random_data(0)
    minimise(model, F.mse_loss, data, {tacit.l2(): 2e-2, tacit.smooth_l1(1e-2): 1e-3})
    regularizers = [tacit.l2(), tacit.smooth_l1(1e-2)]
    assert not tacit.estimate(model, F.mse_loss, data, regularizers).problems
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * torch.randn_like(parameter)
    near_optimum = tacit.estimate(model, F.mse_loss, data, [tacit.l2()])
    assert near_optimum.residual_ratio > 1e-2
    assert not reports(near_optimum, "chance_in_residual")
