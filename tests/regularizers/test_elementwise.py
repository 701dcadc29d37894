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


def test_l1_has_kinks_at_zeros_to_within_its_width_of_the_largest_weight_in_scope():
    params = random_params(PARAMS)
    largest = max(float(p.abs().max()) for p in params.values())
    params["0.weight"][1, 2] = 0
    params["2.bias"][0] = -0.0
    params["2.bias"][1] = 1.01e-9 * largest
    params["0.bias"][:] = 0.99e-9 * largest  # all of a tensor
    zeros = {"0.weight": [[1, 2]], "2.bias": [[0]]}
    assert kink_positions(tacit.l1(zero_width=0), params) == zeros
    assert kink_positions(tacit.l1(), params) == zeros | {"0.bias": [[i] for i in range(4)]}
    assert kink_positions(tacit.l1(zero_width=1e-8), params)["2.bias"] == [[0], [1]]
    assert kink_positions(tacit.layerwise(tacit.l1), params) == kink_positions(tacit.l1(), params)
    assert kink_positions(tacit.l1(scope="0.bias"), params) == {}


@pytest.mark.parametrize("width", [-1e-9, 1.0, float("nan"), "0", True])
def test_a_zero_width_is_a_part_of_the_largest_weight(width):
    with pytest.raises(tacit.InputError, match="zero_width"):
        tacit.l1(zero_width=width)


def test_training_the_model_further_does_not_move_the_reference_of_distance_to():
    model = tanh_mlp(0)
    distance = tacit.regularizers.distance_to(dict(model.named_parameters()))
    with torch.no_grad():
        model[0].weight += 1
    assert float(distance.value(params_of(model))) == pytest.approx(40, rel=1e-12)
