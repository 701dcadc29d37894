"""Rows of the equations, read in slices, agree with dense columns."""

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from support.scoring import fit_and_score, fit_endpoint, strengths_of
from torch.nn import functional as F

import tacit
from tacit import Objective, reference, score_examples
from tacit.equations import candidates
from tacit.equations.candidates import check_candidates
from tacit.uncertainty import directions as directions_module
from tacit.uncertainty.directions import (
    balanced_signs,
    build_directions,
    known_products,
    square_norm_of_rows,
    unexplained_rows,
)


@pytest.fixture(params=[2**21, 3])
def problem(request, monkeypatch):
    """Rows of two estimated penalties and a known one, read whole and in small slices."""
    monkeypatch.setattr(candidates, "CHUNK", request.param)
    model = tanh_mlp(3)
    with torch.no_grad():
        model[0].weight[0] = 0  # kinks of l1
    params, known = params_of(model), tacit.smooth_l1(0.1, scope="2")
    estimated = [tacit.l2(), tacit.l1(scope="0")]
    bound = check_candidates(estimated, {known: 0.5}).bind(params, "*.weight")
    has_equation = torch.cat(
        [((p != 0) | (n != "0.weight")).flatten() & (p.ndim == 2) for n, p in params.items()]
    )
    design = reference.design(estimated, params) * has_equation[:, None]
    known_column = reference.design([known], params)[:, 0] * has_equation
    return bound, design, known_column, has_equation


def flat(direction, params):
    """A direction as one vector, with zeros for the tensors that it does not have."""
    return reference.flat({n: direction.get(n, torch.zeros_like(p)) for n, p in params.items()})


@pytest.mark.parametrize("stored_entries", [2**26, 0])
def test_directions_are_combinations_of_columns_followed_by_probes(
    problem, monkeypatch, stored_entries
):
    monkeypatch.setattr(directions_module, "MAX_STORED_ENTRIES", stored_entries)
    bound, design, known_column, has_equation = problem
    combinations = torch.tensor([[1.0, 0.5, 0.0], [0.0, -2.0, 3.0]]).double()
    directions = build_directions(bound, combinations, [7, 8])
    assert len(directions) == 5
    vectors = torch.stack([flat(v, bound.params) for v in directions], dim=1)
    torch.testing.assert_close(vectors[:, :3], design @ combinations)
    assert torch.equal(vectors[:, 3:].abs(), has_equation[:, None].double().expand(-1, 2))
    assert torch.equal(flat(directions[-1], bound.params), vectors[:, -1])
    torch.testing.assert_close(
        known_products(bound, directions, 3), 0.5 * known_column @ vectors[:, :3]
    )
    with pytest.raises(IndexError):
        directions[5]


def test_residuals_and_norms_leave_out_rows_without_equations(problem):
    bound, design, known_column, has_equation = problem
    params = bound.params
    target = {n: torch.full_like(p, 2.0) for n, p in params.items()}
    strengths = torch.tensor([0.3, -0.2]).double()
    unexplained = flat(unexplained_rows(bound, target, strengths), params)
    expected = (2.0 - 0.5 * known_column - design @ strengths) * has_equation
    torch.testing.assert_close(unexplained, expected)
    assert square_norm_of_rows(bound, target) == pytest.approx(4 * int(has_equation.sum()))


def test_of_very_many_examples_a_part_has_signs(monkeypatch):
    monkeypatch.setattr(directions_module, "MOST_SIGNED", 40)
    signs = balanced_signs(1001, seed=1)
    assert signs.sum() == 0
    assert 240 <= signs.abs().sum() <= 250
    with_sign = signs.nonzero().flatten()
    assert with_sign[0] < 2
    assert with_sign[-1] > 998
    assert (with_sign.diff() > 2).sum() == 3  # gaps between four runs


def test_balanced_signs_add_up_to_zero():
    for count in (10, 11):
        signs = balanced_signs(count, seed=3)
        assert float(signs.sum()) == 0
        assert int(signs.abs().sum()) == 2 * (count // 2)
        assert torch.equal(signs, balanced_signs(count, seed=3))


def test_rows_and_kinks_are_left_out_of_scores_and_rebuilt_directions_change_nothing(monkeypatch):
    model, (X, y) = tanh_mlp(3), random_data(3)
    with torch.no_grad():
        model[0].weight[0] = 0  # where l1 has no gradient
    objective = Objective(model, F.mse_loss, (X, y))
    regularizers = [tacit.l2(), tacit.l1()]
    fit, scores = fit_and_score(objective, regularizers, rows="*.weight")
    assert scores.rows == fit.rows < 48
    part = Objective(model, F.mse_loss, (X[:30], y[:30]))
    expected = strengths_of(fit_endpoint(part, regularizers, rows="*.weight"))
    torch.testing.assert_close(strengths_of(fit) + scores.values[:30].mean(0), expected)
    monkeypatch.setattr(directions_module, "MAX_STORED_ENTRIES", 0)
    again = score_examples(fit)
    torch.testing.assert_close(again.values, scores.values, rtol=1e-12, atol=1e-14)
