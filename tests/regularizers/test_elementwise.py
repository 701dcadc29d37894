"""Ridge, lasso and distances: scale conventions, kinks and the copied reference point."""

import pytest
import torch
from support.columns import kink_positions, random_params
from support.models import params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit

PARAMS = params_of(tanh_mlp(0, sizes=(3, 4, 2)))


def test_torch_weight_decay_is_twice_the_strength_of_l2():
    strength, learning_rate = 0.03, 0.1
    model, (X, y) = tanh_mlp(2), random_data(1)
    start = params_of(model)
    loss_gradient = tacit.Objective(model, F.mse_loss, (X, y)).gradient()
    penalty_gradient = tacit.l2().gradient(start)["l2"]
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, weight_decay=2 * strength)
    F.mse_loss(model(X), y).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        gradient = loss_gradient[name] + strength * penalty_gradient[name]
        expected = start[name] - learning_rate * gradient
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-15)


def test_l1_has_kinks_only_at_exact_zeros():
    params = random_params(PARAMS)
    params["0.weight"][1, 2] = 0
    params["2.bias"][0] = -0.0
    params["0.bias"][0] = 1e-300
    assert kink_positions(tacit.l1(), params) == {"0.weight": [[1, 2]], "2.bias": [[0]]}


def test_training_the_model_further_does_not_move_the_reference_of_distance_to():
    model = tanh_mlp(0)
    distance = tacit.regularizers.distance_to(dict(model.named_parameters()))
    with torch.no_grad():
        model[0].weight += 1
    assert float(distance.value(params_of(model))) == pytest.approx(40, rel=1e-12)
