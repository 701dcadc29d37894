"""Known penalties are recovered: closed forms in linear models, exact optima of networks."""

from copy import deepcopy

import pytest
import torch
from scipy.optimize import minimize
from support.models import (
    elastic_net,
    image_data,
    load,
    minimise,
    params_of,
    random_data,
    small_cnn,
    tanh_mlp,
)
from torch import nn
from torch.nn import functional as F

import tacit


def linear_model(theta):
    model = nn.Linear(len(theta), 1, bias=False).double()
    load(model, {"weight": theta[None]})
    return model


def ridge_optimum(X, y, strength):
    """Closed form for mean squared error + λ‖θ‖²."""
    n, p = X.shape
    return torch.linalg.solve(X.T @ X / n + strength * torch.eye(p).double(), X.T @ y[:, 0] / n)


def elastic_net_optimum(X, y, ridge, lasso):
    """Exact minimiser of mean squared error + λ₂‖θ‖² + λ₁‖θ‖₁: solved on its active set.

    The active set and signs come from a smooth solve in split variables θ = a − b, a, b ≥ 0; the
    optimality conditions of the result are asserted, zeros included.
    """
    n, p = X.shape
    gram, cross = (X.T @ X / n), (X.T @ y[:, 0] / n)

    def value_and_gradient(parts):
        a, b = torch.from_numpy(parts).chunk(2)
        theta = a - b
        value = theta @ gram @ theta - 2 * cross @ theta + ridge * theta @ theta
        gradient = 2 * (gram @ theta - cross + ridge * theta)
        gradients = torch.cat([gradient + lasso, lasso - gradient])
        return float(value + lasso * (a + b).sum()), gradients.numpy()

    start = torch.full((2 * p,), 0.1, dtype=torch.float64).numpy()
    minimum = minimize(
        value_and_gradient, start, jac=True, method="L-BFGS-B", bounds=[(0, None)] * (2 * p),
        options={"maxiter": 10_000, "ftol": 1e-16, "gtol": 1e-12},
    )  # fmt: skip
    a, b = torch.from_numpy(minimum.x).chunk(2)
    approximate = a - b
    active = approximate.abs() > 1e-6
    signs, k = approximate[active].sign(), int(active.sum())
    theta = torch.zeros(p, dtype=torch.float64)
    matrix = gram[active][:, active] + ridge * torch.eye(k).double()
    theta[active] = torch.linalg.solve(matrix, cross[active] - lasso / 2 * signs)
    gradient = 2 * (gram @ theta - cross + ridge * theta)
    assert torch.equal(theta[active].sign(), signs)
    assert bool((gradient[~active].abs() < lasso).all())
    return theta


def sparse_data(seed, inputs=12):
    X, y = random_data(seed, count=80, inputs=inputs)
    relevant = (torch.arange(inputs) % 3 == 0).double()
    return X, (X * relevant) @ torch.ones(inputs, 1).double() + 0.3 * y / y.std()


@pytest.mark.parametrize("strength", [1e-4, 1e-2, 3.0])
def test_ridge_is_recovered_from_its_closed_form(strength):
    X, y = random_data(0)
    fit = tacit.estimate(
        linear_model(ridge_optimum(X, y, strength)), F.mse_loss, (X, y), [tacit.l2()]
    )
    assert fit.strengths["l2"] == pytest.approx(strength, rel=1e-10)
    assert fit.explained == pytest.approx(1, abs=1e-10)
    assert not fit.problems


def test_lasso_is_recovered_and_its_exact_zeros_are_counted():
    X, y = sparse_data(1)
    theta = elastic_net_optimum(X, y, 0.0, 0.3)
    zeros = int((theta == 0).sum())
    assert 0 < zeros < len(theta)
    fit = tacit.estimate(linear_model(theta), F.mse_loss, (X, y), [tacit.l1()])
    assert fit.strengths["l1"] == pytest.approx(0.3, rel=1e-10)
    assert fit.rows == len(theta) - zeros
    assert [problem.kind for problem in fit.problems] == ["zeros"]
    assert f"{zeros} of {len(theta)}" in fit.problems[0].message


@pytest.mark.parametrize(("ridge", "lasso"), [(0.1, 0.3), (0.5, 0.05), (1e-3, 0.2)])
def test_elastic_net_is_recovered_in_a_linear_model(ridge, lasso):
    X, y = sparse_data(2)
    model = linear_model(elastic_net_optimum(X, y, ridge, lasso))
    fit = tacit.estimate(model, F.mse_loss, (X, y), [tacit.l2(), tacit.l1()])
    assert fit.strengths["l2"] == pytest.approx(ridge, rel=1e-10)
    assert fit.strengths["l1"] == pytest.approx(lasso, rel=1e-10)


def test_zeros_outside_the_scope_of_l1_stay_in_the_equations():
    X, y = random_data(3, inputs=4)
    model = linear_model(torch.tensor([0.0, 1.0, 2.0, 3.0]).double())
    model.register_parameter("extra", nn.Parameter(torch.zeros(2).double()))
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    lasso = tacit.l1(scope="weight")
    assert tacit.endpoint_equations(objective, [lasso]).rows == 3 + 2
    assert tacit.endpoint_equations(objective, [tacit.l1()]).rows == 3
    # Known penalties have kinks too.
    assert tacit.endpoint_equations(objective, [tacit.l2()], known={lasso: 0.1}).rows == 3 + 2


NETWORKS = {
    "mlp": (tanh_mlp, F.mse_loss, random_data),
    "cnn": (small_cnn, F.cross_entropy, image_data),
}


@pytest.fixture(scope="module", params=NETWORKS)
def trained(request):
    make_model, loss, make_data = NETWORKS[request.param]
    model, data = make_model(4), make_data(5)
    minimise(model, loss, data, elastic_net((2e-2, 1e-2)))
    return model, loss, data


@pytest.fixture(scope="module", params=NETWORKS)
def trained_by_layer(request):
    make_model, loss, make_data = NETWORKS[request.param]
    model, data = make_model(6), make_data(7)
    ridge, lasso = tacit.layerwise(tacit.l2()), tacit.layerwise(tacit.smooth_l1(1e-3))
    count = len(ridge.value(dict(model.named_parameters())))
    strengths = torch.logspace(-2, -1.5, 2 * count, dtype=torch.float64)
    minimise(model, loss, data, {ridge: strengths[:count], lasso: strengths[count:]})
    return model, loss, data, [ridge, lasso], strengths


def test_both_strengths_of_an_elastic_net_are_recovered(trained):
    fit = tacit.estimate(*trained, list(elastic_net()))
    assert fit.strengths == pytest.approx({"l2": 2e-2, "smooth_l1": 1e-2}, rel=1e-6)
    assert fit.explained == pytest.approx(1, abs=1e-10)
    assert not fit.problems


def test_the_strengths_of_every_layer_are_recovered(trained_by_layer):
    *trained_model, regularizers, strengths = trained_by_layer
    fit = tacit.estimate(*trained_model, regularizers)
    assert list(fit.strengths.values()) == pytest.approx(strengths.tolist(), rel=1e-6)
    assert not fit.problems


def test_float32_weights_and_data_give_three_digits(trained):
    model, loss, (X, y) = trained
    narrow = deepcopy(model).float()
    data = (X.float(), y.float() if y.is_floating_point() else y)
    fit = tacit.estimate(narrow, loss, data, list(elastic_net()))
    assert fit.strengths == pytest.approx({"l2": 2e-2, "smooth_l1": 1e-2}, rel=1e-3)
    assert not fit.problems


def test_a_known_strength_is_subtracted_and_the_rest_is_estimated(trained):
    fit = tacit.estimate(*trained, list(elastic_net()), known={tacit.l2(): 5e-3})
    assert fit.strengths == pytest.approx({"l2": 1.5e-2, "smooth_l1": 1e-2}, rel=1e-6)
    assert "l2 = 0.005" in fit.summary()
    assert not fit.problems


def test_layers_of_a_shared_elastic_net_agree(trained):
    fit = tacit.estimate(*trained, list(elastic_net()))
    for label, part in fit.layers.items():
        assert part.explained == pytest.approx(1, abs=1e-8), label
        assert part.strengths["l2"] == pytest.approx(2e-2, rel=1e-5), label


def test_rows_restrict_the_equations_and_scopes_only_the_columns(trained):
    model, loss, data = trained
    objective = tacit.Objective(model, loss, data)
    equations = tacit.endpoint_equations(objective, list(elastic_net()), rows="*.weight")
    assert tacit.fit(equations).strengths == pytest.approx(
        {"l2": 2e-2, "smooth_l1": 1e-2}, rel=1e-6
    )
    regularizers = [tacit.l2(scope="*.weight"), tacit.smooth_l1(1e-3, scope="*.weight")]
    fit = tacit.fit(tacit.endpoint_equations(objective, regularizers))
    # The rows of the biases stay in the target, and no column explains them.
    assert fit.rows > equations.rows
    assert fit.explained < 1 - 1e-6


def test_params_of_another_point_are_used():
    model, data = tanh_mlp(0), random_data(0)
    objective = tacit.Objective(model, F.mse_loss, data)
    regularizers = [tacit.l2(), tacit.smooth_l1(0.05)]
    doubled = {n: 2 * p for n, p in params_of(model).items()}
    equations = tacit.endpoint_equations(objective, regularizers, params=doubled)
    load(model, doubled)
    current = tacit.endpoint_equations(tacit.Objective(model, F.mse_loss, data), regularizers)
    assert tacit.fit(equations) == tacit.fit(current)


def test_autocast_raises_the_level_of_rounding():
    model = tanh_mlp(6).float()
    data = tuple(part.float() for part in random_data(6))
    objective = tacit.Objective(model, F.mse_loss, data)
    plain = tacit.endpoint_equations(objective, [tacit.l2()]).floor
    with torch.autocast("cpu", torch.bfloat16):
        autocast = tacit.endpoint_equations(objective, [tacit.l2()]).floor
    assert autocast > 1000 * plain
