"""Conditions, inflation and unique directions of a design, against dense formulas."""

import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.optimize import lsq_linear
from support.systems import SEEDS, draw, equations, quick, random_system

import tacit
from tacit.fitting.solving import System


@quick
@given(seed=SEEDS)
def test_inflation_and_condition_are_those_of_unit_columns(seed):
    design, target = random_system(seed)
    unit = design / design.norm(dim=0)
    fit = tacit.fit(equations(design, target))
    expected = torch.linalg.inv(unit.T @ unit).diagonal().tolist()
    assert list(fit.inflation.values()) == pytest.approx(expected, rel=1e-6)
    assert fit.condition == pytest.approx(float(torch.linalg.cond(unit)), rel=1e-6)


@quick
@given(seed=SEEDS)
def test_unique_directions_are_residuals_of_each_column_on_the_others(seed):
    design, _ = random_system(seed)
    directions = System(design).unique_directions
    for column in range(design.shape[1]):
        others = design[:, [j for j in range(design.shape[1]) if j != column]]
        residual = (
            design[:, column] - others @ torch.linalg.lstsq(others, design[:, column]).solution
        )
        torch.testing.assert_close(
            directions[:, column], residual / residual.norm(), rtol=1e-6, atol=1e-8
        )


def test_exactly_dependent_columns_cancel_and_have_infinite_condition():
    design, _ = random_system(3)
    system = System(torch.cat([design, 2 * design[:, :1]], dim=1))
    (combination,) = system.cancelling()
    unit = system.design / system.norms
    assert float((unit @ combination).norm()) == pytest.approx(0, abs=1e-12)
    assert combination.abs().max() == 1
    assert torch.nonzero(combination.abs() > 1e-9)[:, 0].tolist() == [0, design.shape[1]]
    assert system.condition == float("inf")
    assert system.rank == design.shape[1]


def test_a_nonnegative_fit_of_columns_that_are_all_zero_is_zero():
    """scipy's nnls, called without a column, ends the process."""
    system = System(torch.zeros(10, 2, dtype=torch.float64))
    assert system.solve_nonnegative(draw(0, 10, 3)).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("bounded", [(0, 1, 1, 1), (1, 0, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1)])
def test_bounds_on_some_strengths_are_those_of_a_solver_with_bounds(bounded):
    generator = torch.Generator().manual_seed(sum(bounded))
    lower = np.where(bounded, 0.0, -np.inf)
    held = 0
    for _ in range(20):
        design = torch.randn(9, 4, generator=generator, dtype=torch.float64)
        design[:, 1] *= 1e-3
        targets = torch.randn(9, 2, generator=generator, dtype=torch.float64)
        mask = torch.tensor(bounded, dtype=torch.bool)
        strengths = System(design).solve_bounded(targets, mask)
        for column in range(2):
            bounds, b = (lower, np.full(4, np.inf)), targets[:, column].numpy()
            expected = lsq_linear(design.numpy(), b, bounds, tol=1e-14).x
            np.testing.assert_allclose(strengths[:, column], expected, rtol=1e-4, atol=1e-6)
        held += int((strengths[mask] == 0).sum())
    assert (held > 0) == any(bounded)


def test_bounded_strengths_that_free_ones_span_keep_the_conditions_of_optimality():
    """A bounded copy of a free column: the residual is orthogonal to the free columns."""
    generator = torch.Generator().manual_seed(0)
    design = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    design = torch.cat([design, design[:, :1]], dim=1)
    target = torch.randn(9, 1, generator=generator, dtype=torch.float64)
    mask = torch.tensor([False, True, True, True])
    strengths = System(design).solve_bounded(target, mask)
    slopes = design.T @ (design @ strengths - target)
    assert (strengths[mask] >= 0).all()
    assert (slopes[mask] >= -1e-10).all()
    torch.testing.assert_close(slopes[~mask], torch.zeros(1, 1, dtype=torch.float64))
    assert float((slopes * strengths).abs().max()) < 1e-10


def test_which_combinations_of_strengths_are_determined():
    """Columns a, a and 0: only the sum of the first two strengths is determined."""
    column = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    design = torch.stack([column, column, torch.zeros(3).double()], dim=1)
    combinations = torch.tensor([[1, 1, 0], [2, 2, 0], [1, 0, 0], [1, -1, 0], [1, 1, 1]]).double()
    assert System(design).determines(combinations).tolist() == [True, True, False, False, False]
