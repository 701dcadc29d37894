"""Penalties that are means over examples."""

import pytest
import torch
from support.hard_to_differentiate import NativeLayerNorm
from support.models import loss_of, params_of, random_data, tanh_mlp
from support.objectives import dropout_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective, reference, techniques
from tacit.regularizers import activation_norm, input_jacobian, mean_of


def fourth_powers(model, batch):
    return model(batch[0])[:, 0] ** 4


def test_value_and_column_are_those_of_the_objective():
    model, data = tanh_mlp(0), random_data(0)
    weights = torch.linspace(0.5, 2, 64).double()
    options = {"weights": weights, "batch_size": 10}
    penalty = mean_of(Objective.from_batch_loss(model, fourth_powers, data, **options))
    params = params_of(model)

    def mean(output, _):
        return weights @ output[:, 0] ** 4 / weights.sum()

    naive = loss_of(model, mean, data)
    torch.testing.assert_close(penalty.value(params), naive(params).reshape(1))
    column = reference.flat(penalty.gradient(params)["mean_of"])
    torch.testing.assert_close(column, reference.gradient(naive, params))
    assert penalty.cost == "pass"


def test_the_mean_of_a_random_objective_is_over_its_draws():
    model, data = dropout_mlp(), random_data(0)
    options = {"training": True, "draws": 3, "seed": 5}
    objective = Objective(model, F.mse_loss, data, **options)
    penalty, params = mean_of(objective), params_of(model)
    draws = [objective.value_and_gradient(params, draws=[draw]) for draw in range(3)]
    expected = sum(value for value, _ in draws) / 3
    assert float(penalty.value(params)) == pytest.approx(expected)
    gradient = sum(reference.flat(gradient) for _, gradient in draws) / 3
    column = reference.flat(penalty.gradient(params)["mean_of"])
    torch.testing.assert_close(column, gradient)


def test_the_mean_of_the_fitted_loss_has_strength_minus_one():
    objective = Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    fit = tacit.fit(tacit.endpoint_equations(objective, mean_of(objective)))
    assert fit.strengths["mean_of"] == pytest.approx(-1)


def test_a_penalty_that_holds_a_part_constant_is_refused():
    def focal(model, batch):
        log_p = F.logsigmoid(model(batch[0])[:, 0])
        return -((1 - log_p.exp()).detach() ** 2) * log_p

    model = tanh_mlp(0)
    penalty = mean_of(Objective.from_batch_loss(model, focal, random_data(0)))
    with pytest.raises(InputError, match=r"mean_of is wrong in .*compute constants outside"):
        penalty.bind(params_of(model))


def test_third_derivatives_through_a_fused_norm_are_refused():
    def curvatures(model, batch):
        x = batch[0].clone().requires_grad_()
        (slopes,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (bends,) = torch.autograd.grad(slopes.sum(), x, create_graph=True)
        return bends.square().sum(1)

    torch.manual_seed(0)
    layers = nn.Linear(5, 6), NativeLayerNorm(6), nn.Tanh(), nn.Linear(6, 1)
    model = nn.Sequential(*layers).double()
    penalty = mean_of(Objective.from_batch_loss(model, curvatures, random_data(0)))
    with pytest.raises(InputError, match=r"wrong in 0.*fused norm"):
        penalty.bind(params_of(model))


def test_half_precision_and_streaming_loaders_agree_with_tensors_in_double():
    model, (X, y) = tanh_mlp(0), random_data(0)
    batches = list(zip(X.split(7), y.split(7), strict=True))
    exact = mean_of(Objective.from_batch_loss(model, fourth_powers, (X, y)))
    streamed = mean_of(Objective.from_batch_loss(model, fourth_powers, batches))
    params = params_of(model)
    columns = [reference.flat(r.gradient(params)["mean_of"]) for r in (exact, streamed)]
    torch.testing.assert_close(*columns)


@pytest.mark.parametrize("penalty", [activation_norm, input_jacobian])
@pytest.mark.parametrize("technique", [techniques.input_noise, techniques.sam])
def test_a_technique_that_a_penalty_would_leave_out_is_refused(penalty, technique):
    plain = Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    with pytest.raises(InputError, match=r"has a technique .*: pass the objective without it"):
        penalty(technique(plain, 0.1))


def test_a_technique_that_changes_the_loss_alone_stays():
    X, _ = random_data(0)
    plain = Objective(tanh_mlp(0, (5, 4, 3)), F.cross_entropy, (X, torch.arange(64) % 3))
    smoothed = techniques.label_smoothing(plain, 0.1)
    values = [input_jacobian(o).value(plain.params) for o in (plain, smoothed)]
    torch.testing.assert_close(*values)  # the Hessian of cross-entropy does not see the targets


def test_the_mean_of_sam_is_refused():
    plain = Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    with pytest.raises(InputError, match="not the derivative of its value"):
        mean_of(techniques.sam(plain, 0.1))
