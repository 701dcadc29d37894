"""Error bars of an SGD endpoint: a dense oracle, simulated chains, what they say, bad calls."""

import math

import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from support.problems import minimise, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective, fit, reference
from tacit.uncertainty import stationary
from tacit.uncertainty.stationary import stationary_error_bars


def endpoint(objective, families, **options):
    return fit(tacit.endpoint_equations(objective, families, **options))


def bars_at(objective, families, *, rate, batch_size, momentum=0.0, **options):
    found = endpoint(objective, families, **options)
    return found, stationary_error_bars(
        found, objective, families, rate=rate, batch_size=batch_size, momentum=momentum, **options
    )


def settled(seed, strengths=(0.02, 0.01), beta=0.3):
    """A small network at the minimum of its loss and elastic net, and its penalties."""
    model, data = tanh_mlp(seed), random_data(seed, count=60)
    families = [tacit.l2(), tacit.smooth_l1(beta)]
    minimise(model, F.mse_loss, data, dict(zip(families, strengths, strict=True)))
    return model, data, families


def gradients(model, data, weights):
    """One gradient an example, times its weight over the mean weight, less the mean of all."""
    X, y = data
    rows = []
    for i in range(len(y)):
        loss = F.mse_loss(model(X[i : i + 1]), y[i : i + 1])
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([s.flatten() for s in slopes]))
    rows, shares = torch.stack(rows), weights / weights.mean()
    mean = (shares[:, None] * rows).mean(0)
    return shares[:, None] * (rows - mean)


def dense(model, data, terms, design, *, rate, batch_size, momentum, weights):
    """Cov of λ̂ from the whole stationary covariance of (δ, v), by the Lyapunov equation."""
    params, (X, y) = params_of(model), data

    def total(params):
        losses = (torch.func.functional_call(model, params, (X,)) - y).square()[:, 0]
        value = weights @ losses / weights.sum()
        return value + sum((s * r.value(params)).sum() for r, s in terms.items())

    H = reference.hessian(total, params)
    size, count = len(H), len(y)
    noise = gradients(model, data, weights)
    noise = noise.T @ noise / (count - 1) * (1 - batch_size / count) / batch_size
    eye = torch.eye(size, dtype=torch.float64)
    # v ← momentum·v + Hδ + ξ, then δ ← δ − rate·v.
    step = torch.cat(
        [
            torch.cat([eye - rate * H, -rate * momentum * eye], 1),
            torch.cat([H, momentum * eye], 1),
        ]
    )
    into = torch.cat([-rate * eye, eye])
    rest = solve_discrete_lyapunov(step.numpy(), (into @ noise @ into.T).numpy())
    turned = torch.linalg.pinv(design) @ H
    return turned @ torch.from_numpy(rest)[:size, :size] @ turned.T


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize(("weighted", "rows"), [(False, None), (True, None), (False, "*.weight")])
def test_covariance_is_that_of_the_dense_lyapunov_equation(monkeypatch, momentum, weighted, rows):
    monkeypatch.setattr(stationary, "SETTLED", 1e-10)
    monkeypatch.setattr(stationary, "MOST", 57)
    model, data, families = settled(0)
    generator = torch.Generator().manual_seed(1)
    weights = torch.ones(60).double()
    if weighted:
        weights = 0.5 + torch.rand(60, generator=generator).double()
    objective = Objective(model, F.mse_loss, data, weights=weights if weighted else None)
    known = {tacit.l2(scope="*.weight", name="decay"): 0.015}
    options = {"rate": 0.1, "batch_size": 8, "momentum": momentum}
    found, bars = bars_at(objective, families, known=known, rows=rows, **options)
    terms = dict(zip(families, found.strengths.values(), strict=True)) | known
    seen = [torch.full_like(p, rows is None or p.ndim == 2) for p in objective.params.values()]
    design = reference.design(families, objective.params)
    design = design * torch.cat([part.flatten() for part in seen])[:, None]
    expected = dense(model, data, terms, design, **options, weights=weights)
    torch.testing.assert_close(bars.covariance, expected, rtol=1e-6, atol=0)
    words = "momentum 0.8 and" if momentum else "and"
    assert bars.kind == "training"
    assert bars.basis.startswith("SGD at rest with steps of 0.1")
    assert bars.basis.endswith(f"{words} batches of 8 of 60 examples")


@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_a_few_directions_are_enough(monkeypatch, rate):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    X, y = random_data(2, count=300, inputs=10)
    families = [tacit.l2(), tacit.smooth_l1(0.1)]
    minimise(model, F.mse_loss, (X, y), dict(zip(families, (0.02, 0.01), strict=True)))
    objective, products, passes = Objective(model, F.mse_loss, (X, y)), [], []
    hvp, along = Objective.hvp, Objective.along
    monkeypatch.setattr(
        Objective, "hvp", lambda self, *given: products.append(1) or hvp(self, *given)
    )
    monkeypatch.setattr(
        Objective, "along", lambda self, *given: passes.append(1) or along(self, *given)
    )
    _, few = bars_at(objective, families, rate=rate, batch_size=10)
    assert len(products) <= 16
    assert len(passes) == 1
    monkeypatch.setattr(stationary, "SETTLED", 1e-9)
    monkeypatch.setattr(stationary, "MOST", 481)
    _, all_ = bars_at(objective, families, rate=rate, batch_size=10)
    apart = (few.covariance / all_.covariance).diagonal() - 1
    assert apart.abs().max() < 0.02


def test_ridge_regression_by_sgd_is_covered():
    chains, size, batch, rate, ridge = 400, 5, 4, 0.02, 0.3
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(400, size, generator=generator).double() * torch.linspace(0.5, 2, size).double()
    y = X @ torch.randn(size, generator=generator).double()
    y = y + torch.randn(400, generator=generator).double()
    A, b = X.T @ X / 400, X.T @ y / 400
    best = torch.linalg.solve(A + ridge * torch.eye(size).double(), b)
    theta = best.repeat(chains, 1)
    for _ in range(1500):
        rows = torch.randint(400, (chains, batch), generator=generator)
        left = (X[rows] @ theta[:, :, None])[:, :, 0] - y[rows]
        slope = 2 * (left[:, None] @ X[rows])[:, 0] / batch + 2 * ridge * theta
        theta = theta - rate * slope
    estimates = -(theta * (theta @ A - b)).sum(1) / theta.square().sum(1)
    model = nn.Linear(size, 1, bias=False).double()
    objective = Objective(model, F.mse_loss, (X, y[:, None]))

    def at(point):
        return bars_at(
            objective, tacit.l2(), rate=rate, batch_size=batch, params={"weight": point[None]}
        )

    found, bars = at(best)
    assert found.strengths["l2"] == pytest.approx(ridge)
    # The spread of 400 is known to 1/√800.
    assert float(estimates.std()) == pytest.approx(bars.standard_errors["l2"], rel=0.12)
    covered = 0
    for estimate, point in zip(estimates, theta, strict=True):
        found, bars = at(point)
        assert found.strengths["l2"] == pytest.approx(float(estimate))
        low, high = bars.intervals(found.strengths)["l2"]
        covered += low <= ridge <= high
    assert 0.92 <= covered / chains <= 0.97, covered / chains


def test_a_network_by_sgd_with_momentum_is_covered():
    chains, batch, rate, momentum = 220, 10, 0.005, 0.5
    model, strengths = tanh_mlp(4, sizes=(3, 5, 1)), (0.02, 0.01)
    X, y = random_data(4, count=600, inputs=3)
    y = torch.tanh(y) + 0.2 * torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    families = [tacit.l2(), tacit.smooth_l1(0.3)]
    minimise(model, F.mse_loss, (X, y), dict(zip(families, strengths, strict=True)))
    objective = Objective(model, F.mse_loss, (X, y))
    many = {n: p.repeat(chains, *[1] * p.ndim) for n, p in params_of(model).items()}
    moved = {n: torch.zeros_like(p) for n, p in many.items()}
    generator = torch.Generator().manual_seed(6)
    for _ in range(1500):
        rows = torch.randint(600, (chains, batch), generator=generator)
        leaves = {n: p.requires_grad_() for n, p in many.items()}
        hidden = torch.baddbmm(leaves["0.bias"][:, None], X[rows], leaves["0.weight"].mT).tanh()
        out = torch.baddbmm(leaves["2.bias"][:, None], hidden, leaves["2.weight"].mT)
        loss = (out - y[rows]).square().mean((1, 2)).sum()
        loss = loss + sum(
            s * r.value(leaves).sum() for r, s in zip(families, strengths, strict=True)
        )
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        moved = {n: momentum * moved[n] + g for n, g in zip(leaves, slopes, strict=True)}
        many = {n: (p - rate * moved[n]).detach() for n, p in leaves.items()}
    covered, errors, estimates = torch.zeros(2), [], []
    for chain in range(chains):
        point = {n: p[chain] for n, p in many.items()}
        found, bars = bars_at(
            objective, families, rate=rate, batch_size=batch, momentum=momentum, params=point
        )
        ends = bars.intervals(found.strengths).values()
        covered += torch.tensor(
            [float(low <= s <= high) for (low, high), s in zip(ends, strengths, strict=True)]
        )
        errors.append(list(bars.standard_errors.values()))
        estimates.append(list(found.strengths.values()))
    spread = torch.tensor(estimates).std(0)
    apart = torch.tensor(errors).median(0).values / spread - 1
    assert apart.abs().max() < 0.15, apart
    assert (covered / chains > 0.9).all(), covered / chains


def test_a_bend_of_the_wrong_sign_and_a_step_too_large():
    model, data, families = settled(7)
    objective = Objective(model, F.mse_loss, data)
    moved = {n: p + 0.3 * torch.ones_like(p) for n, p in objective.params.items()}
    _, bars = bars_at(objective, families, rate=0.05, batch_size=8, params=moved)
    assert torch.linalg.eigvalsh(bars.covariance)[0] > 0
    for momentum in (0.0, 0.9):
        _, bars = bars_at(objective, families, rate=2.0, batch_size=8, momentum=momentum)
        assert all(math.isinf(e) for e in bars.standard_errors.values())
        assert "no rest is possible, as steps times curvature reach" in bars.basis
    found, bars = bars_at(objective, families, rate=0.05, batch_size=60)
    assert not bars.covariance.any()
    assert "there is no noise" in bars.basis
    assert "training" in found.with_error_bars(bars).summary()


def test_strengths_held_at_zero_and_undetermined_ones():
    model, data, families = settled(8)
    objective = Objective(model, F.mse_loss, data)
    options = {"rate": 0.05, "batch_size": 8}
    known = {tacit.smooth_l1(0.3, name="more"): 0.015}  # more than there is: what is left is −0.005
    found = fit(tacit.endpoint_equations(objective, families, known=known), nonnegative=True)
    held = [n for n, value in found.strengths.items() if not value]
    bars = stationary_error_bars(found, objective, families, known=known, **options)
    errors = bars.standard_errors
    assert held == ["smooth_l1"]
    assert {n for n, e in errors.items() if math.isnan(e)} == set(held)
    twice = [tacit.l2(), tacit.l2(name="again"), tacit.smooth_l1(0.1)]
    _, bars = bars_at(objective, twice, **options)
    assert [math.isinf(e) for e in bars.standard_errors.values()] == [True, True, False]


def test_single_precision_and_penalties_without_a_hessian():
    model, data, _ = settled(9)
    options = {"rate": 0.05, "batch_size": 8}

    def of(model, data):
        objective = Objective(model, F.mse_loss, data)
        return bars_at(objective, [tacit.l2(), tacit.l1()], **options)[1].covariance

    double = of(model, data)
    single = of(model.float(), tuple(t.float() for t in data))
    torch.testing.assert_close(single, double, rtol=1e-3, atol=0)
    objective = Objective(model.double(), F.mse_loss, data)
    known = {tacit.regularizers.gradient_norm(objective, name="steps"): 0.01}
    _, bars = bars_at(objective, tacit.l2(), known=known, **options)
    assert bars.basis.endswith("the curvature of steps left out")


def test_bad_calls_are_refused():
    model, (X, y) = tanh_mlp(10), random_data(10)
    objective, families = Objective(model, F.mse_loss, (X, y)), [tacit.l2(), tacit.l1()]
    equations = tacit.endpoint_equations(objective, families)
    found = fit(equations)
    path = tacit.Trajectory([objective.params], [objective.params], [1.0])
    steps = fit(tacit.trajectory_equations(objective, path, families))
    other = fit(tacit.difference_equations(objective, objective, families))

    def call(found=found, objective=objective, families=families, **options):
        options = {"rate": 0.1, "batch_size": 8} | options
        return lambda: stationary_error_bars(found, objective, families, **options)

    calls = {
        "found is a dict": call({}),
        "an objective is a Sequential": call(objective=model),
        "2 stacked sources": call(fit(tacit.stack([equations, equations]))),
        "trajectory equations": call(steps),
        "difference equations, at fixed weights": call(other),
        "the regularizers given have": call(families=families[::-1]),
        "known is": call(known={tacit.l2(name="x"): 1}),
        "rows here and": call(rows="0"),
        "9 examples and the fit 64": call(objective=Objective(model, F.mse_loss, (X[:9], y[:9]))),
        "that has not changed": call(objective=Objective(model, F.mse_loss, (X, y * 2))),
        "rate is 0": call(rate=0),
        "rate is nan": call(rate=math.nan),
        "rate is '0.1'": call(rate="0.1"),
        "momentum is 1.0": call(momentum=1.0),
        "momentum is -0.1": call(momentum=-0.1),
        "batch_size is 65 for 64": call(batch_size=65),
        "batch_size is 0": call(batch_size=0),
        "batch_size is 8.0": call(batch_size=8.0),
        "batch_size is True": call(batch_size=True),
    }
    for text, made in calls.items():
        with pytest.raises(InputError, match=text):
            made()
