"""Ridge, lasso and distances: scale conventions, kinks and the copied reference point."""

import math

import pytest
import torch
from support.columns import dense_columns, kink_positions, random_params
from support.models import params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit.regularizers import hypentropy, power

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


@pytest.mark.parametrize(("p", "make"), [(1, tacit.l1), (2, tacit.l2)])
def test_powers_one_and_two_are_lasso_and_ridge(p, make):
    params = random_params(PARAMS)
    params["0.weight"][1, 2] = 0
    torch.testing.assert_close(
        dense_columns(power(p), params), dense_columns(make(), params), rtol=1e-14, atol=0
    )
    assert kink_positions(power(p), params) == kink_positions(make(), params)


def test_a_power_has_kinks_at_zero_up_to_one_and_none_above_unless_a_width_is_passed():
    params = random_params(PARAMS)
    params["0.weight"][1, 2] = 0
    params["2.bias"][1] = 1e-5
    assert kink_positions(power(0.5), params) == {"0.weight": [[1, 2]]}
    assert kink_positions(power(0.5, zero_width=1e-4), params)["2.bias"] == [[1]]
    assert kink_positions(power(1.5), params) == {}
    zeros = {"0.weight": [[1, 2]], "2.bias": [[1]]}
    assert kink_positions(power(1.5, zero_width=1e-4), params) == zeros


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0, 1.1, 1.9, 2.0, 7.0])
def test_a_power_and_its_derivatives_are_finite_at_zero(p):
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(power(p).value({"w": zero}).sum(), zero)
    assert not gradient.any()
    assert not dense_columns(power(p), {"w": zero.detach()}).any()


@pytest.mark.parametrize("p", [0, -1, math.inf, math.nan, "1", True])
def test_an_exponent_is_a_number_above_zero(p):
    for make in (power, tacit.regularizers.schatten):
        with pytest.raises(tacit.InputError, match="p is"):
            make(p)


def test_weights_that_oscillate_near_zero_under_a_power_are_reported():
    """Subgradient steps on L + λ Σ|θ|^p leave some weights near zero, for p of 1 and above."""
    generator = torch.Generator().manual_seed(5)
    X = torch.randn(200, 30, generator=generator, dtype=torch.float64)
    truth = torch.zeros(30, 1, dtype=torch.float64)
    truth[:8] = 1
    y = X @ truth + 0.5 * torch.randn(200, 1, generator=generator, dtype=torch.float64)
    model = torch.nn.Linear(30, 1, bias=False).double()
    penalty = power(1.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(2000):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), y)
        (loss + 0.3 * penalty.value(dict(model.named_parameters())).sum()).backward()
        optimizer.step()
    fit = tacit.estimate(model, F.mse_loss, (X, y), penalty)
    assert any("zero_width" in problem.remedy for problem in fit.problems)
    fit = tacit.estimate(model, F.mse_loss, (X, y), power(1.05, zero_width=0.05))
    assert fit.strengths["power"] == pytest.approx(0.3, rel=0.02)
    assert not fit.problems


def test_hypentropy_is_ridge_well_below_its_scale_and_exact_at_any_size():
    params = random_params(PARAMS)
    below = dense_columns(hypentropy(1e4), params)
    torch.testing.assert_close(below, dense_columns(tacit.l2(), params) / 4e4, rtol=1e-6, atol=0)
    sizes = [-1e12, -3.0, -1e-9, 0.0, 1e-12, 0.2, 1e8]
    for scale in (1e-6, 1.0, 1e6):
        theta = {"w": torch.tensor(sizes, dtype=torch.float64)}
        expected = [math.asinh(size / (2 * scale)) for size in sizes]
        columns = dense_columns(hypentropy(scale), theta)[:, 0].tolist()
        assert columns == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, "1"])
def test_a_scale_is_a_number_above_zero(scale):
    with pytest.raises(tacit.InputError, match="scale is"):
        hypentropy(scale)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (power(0.5), power(1)),
        (hypentropy(1.0), hypentropy(2.0)),
        (tacit.regularizers.schatten(1), tacit.regularizers.schatten(0.5)),
    ],
)
def test_equations_of_different_exponents_or_scales_are_not_stacked(one, other):
    model, data = tanh_mlp(2), random_data(1)
    objective = tacit.Objective(model, F.mse_loss, data)
    parts = [tacit.endpoint_equations(objective, family) for family in (one, other)]
    with pytest.raises(tacit.InputError, match=r"differ|same"):
        tacit.stack(parts)
    tacit.stack([parts[0], tacit.endpoint_equations(objective, one)])
