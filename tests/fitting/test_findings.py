"""Seven laws with a negative strength: a finding, and not a Problem, where the law explains all."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from support.systems import draw, equations
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F

import tacit


def half_squares(outputs, targets):
    return (outputs - targets).square().mean() / 2


def loss_function(model, loss, data):
    return lambda params: loss(functional_call(model, params, (data[0],)), data[1])


def one_step(model, data, end, time, columns, reference):
    """The equations of the step from the model's weights to `end`."""
    objective = tacit.Objective(model, F.mse_loss, data)
    trajectory = tacit.Trajectory.from_positions([params_of(model), end], time)
    candidates = columns(objective)
    return tacit.trajectory_equations(objective, trajectory, candidates, reference=reference)


def implicit_euler():
    """θ′ = θ − η∇L(θ′) adds −η/4 ‖∇L‖² to the flow."""
    model, data, step = tanh_mlp(3), random_data(3), 1e-3
    gradient, start = grad(loss_function(model, F.mse_loss, data)), params_of(model)
    end = start
    for _ in range(30):
        slope = gradient(end)
        end = {n: start[n] - step * slope[n] for n in start}

    def columns(objective):
        return [tacit.regularizers.gradient_norm(objective)]

    return one_step(model, data, end, step, columns, tacit.rk4()), [-step / 4]


def clipping():
    """A gradient clipped to the norm c is (c/‖∇L‖) ∇L: L itself has the strength c/‖∇L‖ − 1."""
    model, data, step = tanh_mlp(3), random_data(3), 0.1
    loss = loss_function(model, F.mse_loss, data)
    start = params_of(model)
    slope = grad(loss)(start)
    length = torch.cat([g.flatten() for g in slope.values()]).norm()
    end = {n: start[n] - step * 0.7 * slope[n] / length for n in start}
    law = [float(0.7 / length) - 1]
    return one_step(
        model, data, end, step, lambda _: [tacit.regularizer("loss", loss)], tacit.equations.euler
    ), law


def federated_averaging():
    """K steps on each client, averaged: Kη/4 ‖∇L‖² − Kη(1−1/K)/4 mean_c ‖∇L_c‖²."""
    model, (X, y), step, steps = tanh_mlp(4), random_data(4), 2e-4, 5
    clients = [(X[i::4], y[i::4]) for i in range(4)]
    losses, start = [loss_function(model, F.mse_loss, part) for part in clients], params_of(model)
    ends = []
    for loss in losses:
        params = start
        for _ in range(steps):
            slope = grad(loss)(params)
            params = {n: params[n] - step * slope[n] for n in params}
        ends.append(params)
    end = {n: sum(part[n] for part in ends) / 4 for n in start}

    def of_clients(params):
        slopes = [grad(loss)(params) for loss in losses]
        return sum(g.square().sum() for slope in slopes for g in slope.values()) / 4

    def columns(objective):
        clients_norm = tacit.regularizer("clients", of_clients)
        return [tacit.regularizers.gradient_norm(objective), clients_norm]

    time = steps * step
    law = [time / 4, -time * (1 - 1 / steps) / 4]
    return one_step(model, (X, y), end, time, columns, tacit.rk4()), law


def adam():
    """Adam, ε inside the root, follows −∇L/s, s² = g² + ε, and −(η/2)(B − A − Bε/s²) ∇Σs / s."""
    model, data, step, betas, eps = tanh_mlp(5), random_data(5), 1e-4, (0.5, 0.9), 0.01
    gradient, params = grad(loss_function(model, F.mse_loss, data)), params_of(model)
    first, second = ({n: torch.zeros_like(p) for n, p in params.items()} for _ in range(2))
    start = params
    for count in range(1, 202):
        slope, start = gradient(params), params
        first = {n: betas[0] * m + (1 - betas[0]) * slope[n] for n, m in first.items()}
        second = {n: betas[1] * v + (1 - betas[1]) * slope[n] ** 2 for n, v in second.items()}
        corrections = [1 - beta**count for beta in betas]
        params = {
            n: p - step * first[n] / corrections[0] / (second[n] / corrections[1] + eps).sqrt()
            for n, p in params.items()
        }
    A, B = ((1 + beta) / (1 - beta) for beta in betas)
    sizes = {n: (g.square() + eps).sqrt() for n, g in gradient(start).items()}

    def total_size(params):
        return sum((g.square() + eps).sqrt().sum() for g in gradient(params).values())

    slope = grad(total_size)(start)
    column = {n: (B - A - B * eps / s**2) * slope[n] / s for n, s in sizes.items()}

    def flow(objective, point, time, step):
        def velocity(params):
            return {n: -g / (g.square() + eps).sqrt() for n, g in gradient(params).items()}

        middle = {n: p + time / 2 * velocity(point)[n] for n, p in point.items()}
        return {n: time * v for n, v in velocity(middle).items()}

    objective = tacit.Objective(model, F.mse_loss, data)
    penalty = tacit.regularizer("sizes", lambda p: sum((p[n] * c).sum() for n, c in column.items()))
    trajectory = tacit.Trajectory.from_positions([start, params], step)
    written = tacit.trajectory_equations(objective, trajectory, [penalty], reference=flow)
    return written, [-step / 2]


class Members(nn.Module):
    """Five networks with a column of outputs each."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(tanh_mlp(seed) for seed in range(5))

    def forward(self, x):
        return torch.cat([member(x) for member in self.members], dim=1)


def ensembling():
    """The loss of the mean output is the mean loss − ½ mean variance over the members."""
    model, data = Members(), random_data(0)
    mean = tacit.Objective(model, lambda f, y: half_squares(f.mean(1, keepdim=True), y), data)
    each = tacit.Objective(model, lambda f, y: half_squares(f, y.expand_as(f)), data)

    def variance(params):
        outputs = functional_call(model, params, (data[0],))
        return outputs.var(1, correction=0).mean() / 2

    penalty = tacit.regularizer("variance", variance)
    return tacit.difference_equations(mean, each, [penalty]), [-1.0]


def mixup():
    """Linear regression, λ uniform: −⅓ L + ⅓ ½ (mean residual)²."""
    torch.manual_seed(0)
    model, (X, y) = nn.Linear(5, 1).double(), random_data(1, count=12)
    pairs = torch.tensor(list(itertools.product(range(12), repeat=2)))
    parts = [0.5 - 12**-0.5, 0.5 + 12**-0.5]  # Gauss's nodes: exact for squares
    mixed = [
        torch.cat([part * v[pairs[:, 0]] + (1 - part) * v[pairs[:, 1]] for part in parts])
        for v in (X, y)
    ]
    technique = tacit.Objective(model, half_squares, tuple(mixed))
    plain = tacit.Objective(model, half_squares, (X, y))

    def residual(params):
        return (functional_call(model, params, (X,)) - y).mean().square() / 2

    loss = tacit.regularizer("loss", loss_function(model, half_squares, (X, y)))
    candidates = [loss, tacit.regularizer("mean residual", residual)]
    return tacit.difference_equations(technique, plain, candidates), [-1 / 3, 1 / 3]


def distillation():
    """Weight a, temperature T → ∞: a mean ‖centred(z − z_teacher)‖²/(2K) − a cross-entropy."""
    X, _ = random_data(2)
    y = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(2))
    model, teacher = tanh_mlp(2, (5, 8, 4)), tanh_mlp(3, (5, 8, 4))
    logits, weight, temperature = teacher(X).detach(), 0.3, 100.0
    rows = torch.cat([y[:, None].double(), logits], dim=1)

    def distilled(z, row):
        hard = F.cross_entropy(z, row[:, 0].long())
        soft = F.cross_entropy(z / temperature, F.softmax(row[:, 1:] / temperature, dim=1))
        return (1 - weight) * hard + weight * temperature**2 * soft

    def distance(params):
        gap = functional_call(model, params, (X,)) - logits
        return (gap - gap.mean(1, keepdim=True)).square().sum(1).mean() / 8

    plain = tacit.Objective(model, lambda z, row: F.cross_entropy(z, row[:, 0].long()), (X, rows))
    loss = tacit.regularizer("loss", loss_function(model, F.cross_entropy, (X, y)))
    candidates = [tacit.regularizer("distance", distance), loss]
    technique = tacit.Objective(model, distilled, (X, rows))
    return tacit.difference_equations(technique, plain, candidates), [weight, -weight]


LAWS = {
    law.__name__: law
    for law in (
        implicit_euler,
        clipping,
        federated_averaging,
        adam,
        ensembling,
        mixup,
        distillation,
    )
}


@pytest.mark.parametrize("name", LAWS)
def test_the_negative_strength_of_a_law_is_a_finding(name):
    written, law = LAWS[name]()
    fit = tacit.fit(written)
    assert list(fit.strengths.values()) == pytest.approx(law, rel=0.03)
    assert fit.explained > 0.99
    assert not fit.problems
    (negative,) = [n for n, strength in fit.strengths.items() if strength < 0]
    (finding,) = fit.findings
    assert f"The strength of {negative} is negative" in finding
    text = " ".join(fit.summary().split())
    assert f"No problems found. Finding: {finding}" in text
    assert fit.to_dict()["findings"] == [finding]


def test_the_negative_strength_is_a_problem_at_endpoints_of_epochs_and_where_much_is_unexplained():
    design = draw(0, 400, 2)
    target = design @ torch.tensor([1.0, -0.5]).double()
    for mode, epoch, noise, expected in (
        ("difference", False, 0.0, False),
        ("trajectory", False, 0.0, False),
        ("endpoint", False, 0.0, True),
        ("trajectory", True, 0.0, True),
        ("difference", False, 0.5, True),
    ):
        written = equations(design, target + noise * draw(1, 400), mode=mode, epoch=epoch)
        fit = tacit.fit(written)
        assert ("negative" in [p.kind for p in fit.problems]) == expected, (mode, epoch, noise)
        assert bool(fit.findings) != expected
    endpoint = equations(design, target)
    both = tacit.stack(
        [endpoint, replace(endpoint, sources=(replace(endpoint.sources[0], mode="difference"),))]
    )
    assert [p.kind for p in tacit.fit(both).problems] == ["negative"]
