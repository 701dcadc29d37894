"""Conditions, inflation and unique directions of a design, against dense formulas."""

import pytest
import torch
from hypothesis import given
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
