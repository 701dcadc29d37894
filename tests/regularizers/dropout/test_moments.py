"""The penalty of dropout by moments, against expectations over all masks of small networks."""

import pytest
import torch
from support.dense_dropout import (
    class_data,
    dense_penalties,
    flat_gradient,
    full_hessian,
    split_at_dropout,
)
from support.masks import dropout_chain, exact_penalty
from support.models import params_of, random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.regularizers import dropout_moments, explicit_dropout
from tacit.regularizers.dropout import batch_penalty, moments

REGRESSION = random_data(3, count=6, inputs=4, outputs=2)
EXACT = {
    "inputs of a linear model": ([nn.Dropout(0.4), nn.Linear(4, 2)], [4]),
    "inputs of two linear layers": (
        [nn.Dropout(0.4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2)], [4]
    ),
    "inputs, twice": ([nn.Dropout(0.4), nn.Dropout(0.2), nn.Linear(4, 2)], [4, 4]),
    "last hidden layer": (
        [nn.Linear(4, 5), nn.GELU(), nn.Dropout(0.6), nn.Linear(5, 2)], [5]
    ),
    "before the activation": (
        [nn.Linear(4, 5), nn.Dropout(0.6), nn.Tanh(), nn.Linear(5, 2)], [5]
    ),
    "around the activation": (
        [nn.Linear(4, 5), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2)], [5, 5]
    ),
    "deep linear network": (
        [
            nn.Dropout(0.2), nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 4), nn.Dropout(0.3),
            nn.Linear(4, 2),
        ], [4, 3, 4]
    ),
    "outputs": ([nn.Linear(4, 2), nn.Identity(), nn.Dropout(0.3)], [2]),
}  # fmt: skip


def value_and_gradient(function, params):
    leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    value = function(leaves)
    gradient = torch.autograd.grad(value, list(leaves.values()))
    return value.detach(), torch.cat([g.flatten() for g in gradient])


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_squared_error_is_exact_where_mean_and_covariance_are(case):
    layers, widths = case
    torch.manual_seed(0)
    model = nn.Sequential(*layers).double()
    params = params_of(model)
    value, gradient = value_and_gradient(
        lambda p: exact_penalty(model, F.mse_loss, REGRESSION, widths, p), params
    )
    penalty = dropout_moments(tacit.Objective(model, F.mse_loss, REGRESSION, batch_size=4))
    torch.testing.assert_close(penalty.value(params)[0], value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(flat_gradient(penalty, params), gradient, rtol=1e-8, atol=1e-11)


CLOSE = {
    "tanh": (nn.Tanh, 0.3, F.cross_entropy, 0.05, 0.12),
    "gelu": (nn.GELU, 0.3, F.cross_entropy, 0.1, 0.2),
    "relu": (nn.ReLU, 0.3, F.cross_entropy, 0.15, 0.35),
    "relu, high rate": (nn.ReLU, 0.6, F.cross_entropy, 0.15, 0.35),
    "tanh, squared error": (nn.Tanh, 0.5, F.mse_loss, 0.05, 0.12),
    "tanh, Huber loss": (nn.Tanh, 0.3, F.huber_loss, 0.05, 0.12),
}
"""Tolerances of R and of ∇R. Hidden layers of five or six units are far from Gaussian."""


@pytest.mark.parametrize("case", CLOSE.values(), ids=CLOSE)
def test_the_expectation_over_all_masks_is_close(case):
    activation, rate, loss, value_tolerance, gradient_tolerance = case
    of_classes = loss is F.cross_entropy
    data = class_data(1, count=5) if of_classes else random_data(1, count=5, inputs=4, outputs=3)
    model = dropout_chain((4, 6, 5, 3), activation, rate, seed=5, scale=1.5)
    params = params_of(model)
    value, gradient = value_and_gradient(
        lambda p: exact_penalty(model, loss, data, [6, 5], p), params
    )
    objective = tacit.Objective(model, loss, data)
    penalty = dropout_moments(objective)
    assert float(penalty.value(params)) == pytest.approx(float(value), rel=value_tolerance)
    error = (flat_gradient(penalty, params) - gradient).norm()
    assert error < gradient_tolerance * gradient.norm()
    second_order = rate / (1 - rate) * flat_gradient(explicit_dropout(objective), params)
    assert error < 0.6 * (second_order - gradient).norm()


def turn_off_first_layer(model, X):
    model[1].bias.fill_(-50.0)


def zero_one_example(model, X):
    X[0] = 0.0
    model[1].bias.zero_()


def zero_rows(model, X):
    model[4].weight[:2] = 0.0


def zero_last_layer(model, X):
    model[7].weight.zero_()


NOT_RANDOM = [turn_off_first_layer, zero_one_example, zero_rows, zero_last_layer]


@pytest.mark.parametrize("change", NOT_RANDOM)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Tanh])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_that_no_mask_changes_have_the_right_gradient(change, activation, dtype):
    """Their variance is zero, and what is divided by it must not reach the gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Dropout(0.2), nn.Linear(4, 5), activation(), nn.Dropout(0.2), nn.Linear(5, 4),
        activation(), nn.Dropout(0.3), nn.Linear(4, 6),
    ).double()  # fmt: skip
    X, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 6, (6,))
    with torch.no_grad():
        change(model, X)
    params = params_of(model)
    _, gradient = value_and_gradient(
        lambda p: exact_penalty(model, F.cross_entropy, (X, y), [4, 5, 4], p), params
    )
    penalty = dropout_moments(tacit.Objective(model.to(dtype), F.cross_entropy, (X.to(dtype), y)))
    error = (flat_gradient(penalty, params_of(model)) - gradient).norm()
    assert error < 0.45 * gradient.norm()


def test_examples_do_not_interact_where_the_covariance_of_outputs_is_singular():
    torch.manual_seed(0)
    model = dropout_chain((4, 3, 3, 12), nn.ReLU, 0.3, scale=1.5)
    data, params = class_data(1, count=8), params_of(model)
    objectives = (tacit.Objective(model, F.cross_entropy, data, batch_size=n) for n in (8, 1))
    whole, single = (flat_gradient(dropout_moments(o), params) for o in objectives)
    torch.testing.assert_close(whole, single, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU])
def test_at_small_rates_it_is_second_order_with_the_curvature_behind_the_layers(activation):
    """`explicit_dropout` leaves that curvature out; here the mean of the outputs has it."""
    rate, data = 0.01, class_data(2, count=3)
    model = dropout_chain((4, 16, 12, 3), activation, rate, seed=1, scale=1.5)
    params = params_of(model)
    functions = dense_penalties(split_at_dropout(model), F.cross_entropy, data, matrix=full_hessian)
    second_order = tacit.regularizer("full", lambda p: sum(f(p) for f in functions))
    objective = tacit.Objective(model, F.cross_entropy, data)
    gradient = flat_gradient(dropout_moments(objective), params)
    full, gauss_newton = (
        (rate / (1 - rate) * flat_gradient(r, params) - gradient).norm() / gradient.norm()
        for r in (second_order, explicit_dropout(objective))
    )
    assert full < 0.1
    assert gauss_newton > 0.5


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Tanh])
def test_the_gradient_is_that_of_the_value(activation):
    model = dropout_chain((4, 6, 5, 3), activation, 0.3, seed=3, scale=1.5)
    params, data = params_of(model), class_data(1, count=5)
    penalty = dropout_moments(tacit.Objective(model, F.cross_entropy, data))
    generator = torch.Generator().manual_seed(0)
    gradient = penalty.gradient(params)["dropout_moments"]
    for _ in range(2):
        direction = {
            n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in params.items()
        }
        ahead, behind = (
            penalty.value({n: p + step * direction[n] for n, p in params.items()})
            for step in (1e-5, -1e-5)
        )
        slope = sum(float((gradient[n] * direction[n]).sum()) for n in params)
        assert float(ahead - behind) / 2e-5 == pytest.approx(slope, rel=1e-6)


def test_members_have_the_penalties_of_single_networks():
    data = class_data(1, count=5)
    networks = [dropout_chain((4, 6, 5, 3), nn.ReLU, 0.3, seed=s) for s in (0, 1)]
    rates = torch.tensor([0.2, 0.6], dtype=torch.float64)
    stacked = {
        n: torch.stack([params_of(network)[n] for network in networks])
        for n in params_of(networks[0])
    }
    X, y = (t.expand(2, *t.shape) for t in data)
    together = batch_penalty(networks[0], F.cross_entropy)(stacked, X, y, rates)
    assert together.shape == (2, 5)
    for network, rate, penalties in zip(networks, rates.tolist(), together, strict=True):
        for module in network:
            if isinstance(module, nn.Dropout):
                module.p = rate
        alone = batch_penalty(network, F.cross_entropy)(params_of(network), *data)
        torch.testing.assert_close(penalties, alone, rtol=1e-10, atol=1e-12)
        objective = tacit.Objective(network, F.cross_entropy, data)
        mean = dropout_moments(objective).value(params_of(network))[0]
        torch.testing.assert_close(mean, alone.mean(), rtol=1e-10, atol=1e-12)


def test_batches_weights_and_groups_of_examples_do_not_matter(monkeypatch):
    data = class_data(1, count=7)
    model = dropout_chain((4, 6, 3), nn.ReLU, 0.3)
    params, weights = params_of(model), torch.tensor([1.0, 2, 0, 3, 1, 1, 2])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=4)
    objectives = (tacit.Objective(model, F.cross_entropy, source) for source in (data, loader))
    expected, *others = [flat_gradient(dropout_moments(o), params) for o in objectives]
    monkeypatch.setattr(moments, "ENTRIES", {"cpu": 1})  # one example at a time
    for objective in (
        tacit.Objective(model, F.cross_entropy, data),
        tacit.Objective(model.train(), F.cross_entropy, loader, training=True, draws=2),
    ):
        others.append(flat_gradient(dropout_moments(objective), params))
    for gradient in others:
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-13)
    rows = torch.repeat_interleave(weights.long())
    copied = tacit.Objective(model, F.cross_entropy, (data[0][rows], data[1][rows]))
    weighted = tacit.Objective(model, F.cross_entropy, data, weights=weights)
    torch.testing.assert_close(
        flat_gradient(dropout_moments(weighted), params),
        flat_gradient(dropout_moments(copied), params), rtol=1e-10, atol=1e-13,
    )  # fmt: skip


@pytest.mark.parametrize("entries", [2**20, 1])
def test_the_influence_of_examples_averages_to_the_gradient(monkeypatch, entries):
    monkeypatch.setattr(moments, "ENTRIES", {"cpu": entries})
    model, (X, y) = dropout_chain((4, 5, 3), nn.Tanh, 0.3), class_data(1, count=6)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=4)
    penalty = dropout_moments(tacit.Objective(model, F.cross_entropy, data))
    params = params_of(model)
    gradient = penalty.gradient(params)["dropout_moments"]
    directions = [gradient, {"0.bias": torch.ones(5, dtype=torch.float64)}]
    assert penalty.influence is not None
    influence = penalty.influence(params, directions)
    assert influence.shape == (6, 2, 1)
    expected = [sum((gradient[n] * v[n]).sum() for n in v) for v in directions]
    torch.testing.assert_close(influence.mean(0)[:, 0], torch.stack(expected))


def test_dropout_has_strength_one():
    """On a wide network, with the whole effect of the masks as the target."""
    torch.manual_seed(0)
    model = dropout_chain((4, 40, 40, 3), nn.ReLU, 0.4, seed=2, scale=2)
    data = class_data(4, count=30)
    technique = tacit.Objective(model, F.cross_entropy, data, training=True, draws=400)
    plain = tacit.Objective(model.eval(), F.cross_entropy, data)
    fit = tacit.fit(tacit.difference_equations(technique, plain, [dropout_moments(plain)]))
    assert fit.strengths["dropout_moments"] == pytest.approx(1, abs=0.1)
    assert fit.explained > 0.95


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.Tanh])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_finite_without_variance(activation, dtype):
    """Dead units, zero weights, an example of zeros, a sure one, and one output."""
    model = dropout_chain((4, 6, 5, 3), activation, 0.5, seed=3).to(dtype)
    X, y = class_data(1, count=5)
    with torch.no_grad():
        X[0] = 0
        X[1] *= 100
        model[0].bias[:3] = -1e6 if activation is nn.ReLU else 0
        model[3].weight[:2] = 0
        model[6].weight[0] = 0
    for loss, target in ((F.cross_entropy, y), (F.mse_loss, torch.zeros(5, 3, dtype=dtype))):
        penalty = dropout_moments(tacit.Objective(model, loss, (X.to(dtype), target)))
        params = params_of(model)
        zero = {n: torch.zeros_like(p) for n, p in params.items()}
        for point in (params, zero):
            assert torch.isfinite(penalty.value(point)).all()
            assert torch.isfinite(flat_gradient(penalty, point)).all()
    assert float(penalty.value(zero)) == pytest.approx(0, abs=1e-12)


def test_float32_gives_the_answer_of_float64():
    model = dropout_chain((4, 30, 20, 3), nn.ReLU, 0.4, seed=3, scale=1.5)
    X, y = class_data(1, count=9)
    gradients = []
    for dtype in (torch.float64, torch.float32):
        objective = tacit.Objective(model.to(dtype), F.cross_entropy, (X.to(dtype), y))
        gradients.append(flat_gradient(dropout_moments(objective), params_of(model)))
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[0].norm()
