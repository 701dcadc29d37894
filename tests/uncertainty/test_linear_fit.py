"""A fit as a linear function of its target, and the fits and data that cannot be scored."""

import math

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from support.scoring import fit_and_score, fit_endpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit import InputError, Objective, reference, score_examples
from tacit.uncertainty.linear_fit import linear_fit_of


def test_strengths_are_linear_in_the_target():
    model, data = tanh_mlp(0), random_data(0)
    objective, regularizers = Objective(model, F.mse_loss, data), [tacit.l2(), tacit.smooth_l1(0.1)]
    fit = fit_endpoint(objective, regularizers)
    linear_fit = linear_fit_of(fit, "score_examples")
    design = reference.design(regularizers, params_of(model))
    target = -reference.flat(objective.gradient())
    expected = torch.linalg.inv(design.T @ design)
    torch.testing.assert_close(linear_fit.gram_inverse, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(expected @ design.T @ target, linear_fit.strengths)
    assert linear_fit.target_square_norm == pytest.approx(float(target @ target))
    assert linear_fit.determined


def test_what_is_not_a_fit_of_one_point_is_refused():
    objective = Objective(tanh_mlp(10), F.mse_loss, random_data(10))
    regularizers = [tacit.l2(), tacit.l1()]
    equations = tacit.endpoint_equations(objective, regularizers)
    path = tacit.Trajectory([objective.params], [objective.params], [1.0])
    steps = tacit.trajectory_equations(objective, path, regularizers)
    wrong_fits = {
        "was given a dict": {},
        "was given a Equations": equations,
        "Write the equations again": tacit.fit(tacit.stack([equations, equations])),
        "trajectory equations": tacit.fit(steps),
    }
    for words, fit in wrong_fits.items():
        with pytest.raises(InputError, match=words):
            score_examples(fit)


def test_data_that_has_changed_is_refused():
    X, y = random_data(10)
    objective = Objective(tanh_mlp(10), F.mse_loss, (X, y))
    fit = fit_endpoint(objective, [tacit.l2(), tacit.l1()])
    y.mul_(2)
    with pytest.raises(InputError, match=r"data has changed.*write them again"):
        score_examples(fit)


def test_a_fit_with_every_strength_at_zero_is_refused():
    X, model = random_data(7)[0], tanh_mlp(0)
    objective = Objective(model, F.mse_loss, (X, model(X).detach() / 2))
    equations = tacit.endpoint_equations(objective, tacit.l2())
    assert tacit.fit(equations).strengths["l2"] < 0
    with pytest.raises(InputError, match=r"fit\.unconstrained"):
        score_examples(tacit.fit(equations, nonnegative=True))


def test_labels_beside_a_shuffled_loader_are_refused():
    groups = torch.arange(200) // 20
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(10, 3, generator=generator).double()[groups]
    y = X.sum(1, keepdim=True) + torch.randn(10, 1, generator=generator).double()[groups]
    torch.manual_seed(1)
    model = nn.Linear(3, 1).double()
    in_memory = Objective(model, F.mse_loss, (X, y))
    _, clustered = fit_and_score(in_memory, tacit.l2(), clusters=groups)
    assert clustered.error_bars().freedom == 9
    loader = DataLoader(TensorDataset(X, y), batch_size=50, shuffle=True)
    shuffled = Objective(model, F.mse_loss, loader)
    with pytest.raises(InputError, match="does not shuffle"):
        fit_and_score(shuffled, tacit.l2(), clusters=groups)
    errors = [
        fit_and_score(objective, tacit.l2())[1].error_bars().standard_errors["l2"]
        for objective in (shuffled, in_memory)
    ]
    assert errors[0] == pytest.approx(errors[1])
    in_order = Objective(model, F.mse_loss, DataLoader(TensorDataset(X, y), batch_size=50))
    _, again = fit_and_score(in_order, tacit.l2(), clusters=groups)
    torch.testing.assert_close(again.values, clustered.values)


def test_a_strength_that_is_rounding_error_only_is_scored():
    """The loss does not depend on the scale of weights before a layer norm."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(5, 32, bias=False), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1)
    )
    data = tuple(part.float() for part in random_data(6))
    by_layer = tacit.layerwise(tacit.l2())
    fit = tacit.estimate(model, F.mse_loss, data, by_layer, population=math.inf)
    assert "sampling" in fit.standard_errors
