"""Error bars of an SGD endpoint: a dense oracle, simulated chains, texts, wrong calls."""

import math

import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from support.models import minimise, params_of, random_data, tanh_mlp
from support.scoring import example_gradients, fit_endpoint
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective, reference
from tacit.uncertainty import stationary
from tacit.uncertainty.stationary import stationary_error_bars


def fit_with_bars(objective, regularizers, *, rate, batch_size, momentum=0.0, **options):
    """A fit of the endpoint equations, and its stationary error bars."""
    fit = fit_endpoint(objective, regularizers, **options)
    steps = {"rate": rate, "batch_size": batch_size, "momentum": momentum}
    return fit, stationary_error_bars(fit, **steps)


def network_at_minimum(seed, strengths=(0.02, 0.01), beta=0.3):
    """A small network at the minimum of its loss and elastic net, its data and its penalties."""
    model, data = tanh_mlp(seed), random_data(seed, count=60)
    regularizers = [tacit.l2(), tacit.smooth_l1(beta)]
    minimise(model, F.mse_loss, data, dict(zip(regularizers, strengths, strict=True)))
    return model, data, regularizers


def weighted_deviations(model, data, weights):
    """Deviations of the examples' gradients from their mean, times weight over mean weight."""
    gradients, shares = example_gradients(model, F.mse_loss, data), weights / weights.mean()
    mean = (shares[:, None] * gradients).mean(0)
    return shares[:, None] * (gradients - mean)


def dense_covariance(model, data, penalties, design, *, rate, batch_size, momentum, weights):
    """Cov of λ̂ from the stationary covariance of (δ, v), which solves a Lyapunov equation."""
    params, (X, y) = params_of(model), data

    def penalised_loss(params):
        losses = (torch.func.functional_call(model, params, (X,)) - y).square()[:, 0]
        value = weights @ losses / weights.sum()
        return value + sum((s * r.value(params)).sum() for r, s in penalties.items())

    H = reference.hessian(penalised_loss, params)
    size, count = len(H), len(y)
    deviations = weighted_deviations(model, data, weights)
    noise = deviations.T @ deviations / (count - 1) * (1 - batch_size / count) / batch_size
    identity = torch.eye(size, dtype=torch.float64)
    # v ← momentum·v + Hδ + ξ, then δ ← δ − rate·v.
    step = torch.cat(
        [
            torch.cat([identity - rate * H, -rate * momentum * identity], 1),
            torch.cat([H, momentum * identity], 1),
        ]
    )
    noise_input = torch.cat([-rate * identity, identity])
    noise = noise_input @ noise @ noise_input.T
    stationary_covariance = solve_discrete_lyapunov(step.numpy(), noise.numpy())
    from_displacement = torch.linalg.pinv(design) @ H
    displacement = torch.from_numpy(stationary_covariance)[:size, :size]
    return from_displacement @ displacement @ from_displacement.T


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize(("weighted", "rows"), [(False, None), (True, None), (False, "*.weight")])
def test_covariance_is_that_of_the_dense_lyapunov_equation(monkeypatch, momentum, weighted, rows):
    monkeypatch.setattr(stationary, "TOLERANCE", 1e-10)
    monkeypatch.setattr(stationary, "MAX_DIRECTIONS", 57)
    model, data, regularizers = network_at_minimum(0)
    generator = torch.Generator().manual_seed(1)
    weights = torch.ones(60).double()
    if weighted:
        weights = 0.5 + torch.rand(60, generator=generator).double()
    objective = Objective(model, F.mse_loss, data, weights=weights if weighted else None)
    known = {tacit.l2(scope="*.weight", name="decay"): 0.015}
    steps = {"rate": 0.1, "batch_size": 8, "momentum": momentum}
    fit, bars = fit_with_bars(objective, regularizers, known=known, rows=rows, **steps)
    penalties = dict(zip(regularizers, fit.strengths.values(), strict=True)) | known
    used = [torch.full_like(p, rows is None or p.ndim == 2) for p in objective.params.values()]
    design = reference.design(regularizers, objective.params)
    design = design * torch.cat([mask.flatten() for mask in used])[:, None]
    expected = dense_covariance(model, data, penalties, design, **steps, weights=weights)
    torch.testing.assert_close(bars.covariance, expected, rtol=1e-6, atol=0)
    words = "momentum 0.8 and" if momentum else "and"
    assert bars.kind == "training"
    assert bars.basis.startswith("SGD at rest with steps of 0.1")
    assert bars.basis.endswith(f"{words} batches of 8 of 60 examples")


def count_calls(monkeypatch, method):
    """A list that grows by one at every call of a method of Objective."""
    calls, original = [], getattr(Objective, method)

    def counted(self, *args, **options):
        calls.append(method)
        return original(self, *args, **options)

    monkeypatch.setattr(Objective, method, counted)
    return calls


@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_a_few_directions_are_enough(monkeypatch, rate):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    data = random_data(2, count=300, inputs=10)
    regularizers = [tacit.l2(), tacit.smooth_l1(0.1)]
    minimise(model, F.mse_loss, data, dict(zip(regularizers, (0.02, 0.01), strict=True)))
    objective = Objective(model, F.mse_loss, data)
    products = count_calls(monkeypatch, "hvp")
    passes = count_calls(monkeypatch, "directional_derivatives")
    _, few = fit_with_bars(objective, regularizers, rate=rate, batch_size=10)
    assert len(products) <= 16
    assert len(passes) == 1
    monkeypatch.setattr(stationary, "TOLERANCE", 1e-9)
    monkeypatch.setattr(stationary, "MAX_DIRECTIONS", 481)
    _, many = fit_with_bars(objective, regularizers, rate=rate, batch_size=10)
    error = (few.covariance / many.covariance).diagonal() - 1
    assert error.abs().max() < 0.02


@pytest.mark.slow
def test_intervals_cover_the_ridge_strength_of_regressions_by_sgd():
    chains, size, batch_size, rate, ridge = 200, 5, 4, 0.02, 0.3
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(400, size, generator=generator).double() * torch.linspace(0.5, 2, size).double()
    y = X @ torch.randn(size, generator=generator).double()
    y = y + torch.randn(400, generator=generator).double()
    A, b = X.T @ X / 400, X.T @ y / 400
    minimum = torch.linalg.solve(A + ridge * torch.eye(size).double(), b)
    theta = minimum.repeat(chains, 1)
    for _ in range(1500):
        batch = torch.randint(400, (chains, batch_size), generator=generator)
        errors = (X[batch] @ theta[:, :, None])[:, :, 0] - y[batch]
        gradient = 2 * (errors[:, None] @ X[batch])[:, 0] / batch_size + 2 * ridge * theta
        theta = theta - rate * gradient
    estimates = -(theta * (theta @ A - b)).sum(1) / theta.square().sum(1)
    model = nn.Linear(size, 1, bias=False).double()
    objective = Objective(model, F.mse_loss, (X, y[:, None]))

    def fit_at(point):
        options = {"rate": rate, "batch_size": batch_size, "params": {"weight": point[None]}}
        return fit_with_bars(objective, tacit.l2(), **options)

    fit, bars = fit_at(minimum)
    assert fit.strengths["l2"] == pytest.approx(ridge)
    # The standard deviation of 200 estimates is itself known to 1/√400.
    assert float(estimates.std()) == pytest.approx(bars.standard_errors["l2"], rel=0.12)
    covered = 0
    for estimate, point in zip(estimates, theta, strict=True):
        fit, bars = fit_at(point)
        assert fit.strengths["l2"] == pytest.approx(float(estimate))
        low, high = bars.intervals(fit.strengths)["l2"]
        covered += low <= ridge <= high
    assert 0.92 <= covered / chains <= 0.97, covered / chains


@pytest.mark.slow
def test_intervals_cover_the_strengths_of_networks_by_sgd_with_momentum():
    chains, batch_size, rate, momentum = 80, 10, 0.005, 0.5
    model, strengths = tanh_mlp(4, sizes=(3, 5, 1)), (0.02, 0.01)
    X, y = random_data(4, count=600, inputs=3)
    y = torch.tanh(y) + 0.2 * torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    regularizers = [tacit.l2(), tacit.smooth_l1(0.3)]
    minimise(model, F.mse_loss, (X, y), dict(zip(regularizers, strengths, strict=True)))
    objective = Objective(model, F.mse_loss, (X, y))
    stacked = {n: p.repeat(chains, *[1] * p.ndim) for n, p in params_of(model).items()}
    velocity = {n: torch.zeros_like(p) for n, p in stacked.items()}
    generator = torch.Generator().manual_seed(6)
    for _ in range(1500):
        batch = torch.randint(600, (chains, batch_size), generator=generator)
        leaves = {n: p.requires_grad_() for n, p in stacked.items()}
        hidden = torch.baddbmm(leaves["0.bias"][:, None], X[batch], leaves["0.weight"].mT).tanh()
        outputs = torch.baddbmm(leaves["2.bias"][:, None], hidden, leaves["2.weight"].mT)
        loss = (outputs - y[batch]).square().mean((1, 2)).sum()
        loss = loss + sum(
            s * r.value(leaves).sum() for r, s in zip(regularizers, strengths, strict=True)
        )
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        velocity = {n: momentum * velocity[n] + g for n, g in zip(leaves, gradients, strict=True)}
        stacked = {n: (p - rate * velocity[n]).detach() for n, p in leaves.items()}
    steps = {"rate": rate, "batch_size": batch_size, "momentum": momentum}
    covered, errors, estimates = torch.zeros(2), [], []
    for chain in range(chains):
        point = {n: p[chain] for n, p in stacked.items()}
        fit, bars = fit_with_bars(objective, regularizers, params=point, **steps)
        intervals = bars.intervals(fit.strengths).values()
        covered += torch.tensor(
            [float(low <= s <= high) for (low, high), s in zip(intervals, strengths, strict=True)]
        )
        errors.append(list(bars.standard_errors.values()))
        estimates.append(list(fit.strengths.values()))
    spread = torch.tensor(estimates).std(0)
    relative = torch.tensor(errors).median(0).values / spread - 1
    assert relative.abs().max() < 0.15, relative
    assert (covered / chains > 0.9).all(), covered / chains


def test_negative_curvature_steps_that_are_too_large_and_full_batches():
    model, data, regularizers = network_at_minimum(7)
    objective = Objective(model, F.mse_loss, data)
    moved = {n: p + 0.3 * torch.ones_like(p) for n, p in objective.params.items()}
    _, bars = fit_with_bars(objective, regularizers, rate=0.05, batch_size=8, params=moved)
    assert torch.linalg.eigvalsh(bars.covariance)[0] > 0
    for momentum in (0.0, 0.9):
        _, bars = fit_with_bars(objective, regularizers, rate=2.0, batch_size=8, momentum=momentum)
        assert all(math.isinf(error) for error in bars.standard_errors.values())
        assert "SGD diverges" in bars.basis
    fit, bars = fit_with_bars(objective, regularizers, rate=0.05, batch_size=60)
    assert not bars.covariance.any()
    assert "there is no noise" in bars.basis
    assert "training" in fit.with_error_bars(bars).summary()


def test_strengths_at_zero_have_no_errors_and_undetermined_ones_infinite_errors():
    model, data, regularizers = network_at_minimum(8)
    objective = Objective(model, F.mse_loss, data)
    steps = {"rate": 0.05, "batch_size": 8}
    known = {tacit.smooth_l1(0.3, name="more"): 0.015}  # more than applied: −0.005 is left
    equations = tacit.endpoint_equations(objective, regularizers, known=known)
    fit = tacit.fit(equations, nonnegative=True)
    at_zero = [n for n, strength in fit.strengths.items() if not strength]
    bars = stationary_error_bars(fit, **steps)
    assert at_zero == ["smooth_l1"]
    assert {n for n, e in bars.standard_errors.items() if math.isnan(e)} == set(at_zero)
    twice = [tacit.l2(), tacit.l2(name="again"), tacit.smooth_l1(0.1)]
    _, bars = fit_with_bars(objective, twice, **steps)
    assert [math.isinf(e) for e in bars.standard_errors.values()] == [True, True, False]


@pytest.mark.slow
def test_single_precision_gives_the_same_covariance():
    model, data, _ = network_at_minimum(9)

    def covariance(model, data):
        objective, regularizers = Objective(model, F.mse_loss, data), [tacit.l2(), tacit.l1()]
        return fit_with_bars(objective, regularizers, rate=0.05, batch_size=8)[1].covariance

    double = covariance(model, data)
    single = covariance(model.float(), tuple(t.float() for t in data))
    torch.testing.assert_close(single, double, rtol=1e-3, atol=0)


@pytest.mark.slow
def test_the_basis_names_penalties_whose_curvature_is_left_out():
    model, data, _ = network_at_minimum(9)
    objective = Objective(model, F.mse_loss, data)
    known = {tacit.regularizers.gradient_norm(objective, name="steps"): 0.01}
    _, bars = fit_with_bars(objective, tacit.l2(), known=known, rate=0.05, batch_size=8)
    assert bars.basis.endswith("the curvature of steps left out")


def test_wrong_calls_are_refused():
    objective = Objective(tanh_mlp(10), F.mse_loss, random_data(10))
    regularizers = [tacit.l2(), tacit.l1()]
    equations = tacit.endpoint_equations(objective, regularizers)
    endpoint_fit = tacit.fit(equations)
    path = tacit.Trajectory([objective.params], [objective.params], [1.0])
    steps_fit = tacit.fit(tacit.trajectory_equations(objective, path, regularizers))
    difference = tacit.fit(tacit.difference_equations(objective, objective, regularizers))

    def call(fit=endpoint_fit, **options):
        options = {"rate": 0.1, "batch_size": 8} | options
        return lambda: stationary_error_bars(fit, **options)

    calls = {
        "was given a dict": call({}),
        "Write the equations again": call(tacit.fit(tacit.stack([equations, equations]))),
        "trajectory equations": call(steps_fit),
        "Pass a fit of endpoint equations": call(difference),
        r"the end of training\) is 0": call(rate=0),
        r"rate \(.*\) is nan": call(rate=math.nan),
        r"rate \(.*\) is '0.1'": call(rate="0.1"),
        "momentum is 1.0": call(momentum=1.0),
        "momentum is -0.1": call(momentum=-0.1),
        "batch_size is 65 for 64.*from 1 to 64": call(batch_size=65),
        "batch_size is 0": call(batch_size=0),
        "batch_size is 8.0": call(batch_size=8.0),
        "batch_size is True": call(batch_size=True),
    }
    for words, wrong_call in calls.items():
        with pytest.raises(InputError, match=words):
            wrong_call()


def test_data_and_weights_that_have_changed_are_refused():
    model, (X, y) = tanh_mlp(11), random_data(11)
    fit = fit_endpoint(Objective(model, F.mse_loss, (X, y)), tacit.l2())
    y.mul_(2)
    with pytest.raises(InputError, match=r"data has changed.*write them again"):
        stationary_error_bars(fit, rate=0.1, batch_size=8)
    y.div_(2)
    assert stationary_error_bars(fit, rate=0.1, batch_size=8).standard_errors["l2"] > 0
    model[0].weight.data.mul_(1.1)
    with pytest.raises(InputError, match="write the equations again"):
        stationary_error_bars(fit, rate=0.1, batch_size=8)
