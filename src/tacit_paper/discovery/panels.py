"""The four panels: how weights are trained, and the law that their penalty has."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import Objective, Target, Trajectory, endpoint_target
from tacit.equations import accumulated_target
from tacit_paper.minimising import minimise

RIDGE, LASSO, BETA = 0.01, 0.05, 0.3
"""Strengths of the elastic net, and the width of its smooth L1."""
ALPHA = 0.1
"""Initial scale of the diagonal network."""
DECAY, EPS = 1.0, 0.1
"""AdamW's weight decay and ε."""
POWER, STRENGTH = 1.5, 0.05
"""The power law λ Σ|θ|^p."""
ENOUGH: Any = {"iterations": 300, "history": 20, "tolerance": 1e-9}
"""Options of `minimise` for errors far below those of the curves."""


class Panel(NamedTuple):
    """One panel: what is to be explained for a seed, and the truth."""

    make_target: Callable[[int], Target]
    law: Callable[[float], float]
    """s′ as a function of the weight."""
    even: bool
    """Whether s(−x) = s(x) is assumed. The elastic net's kinks are found without it."""


def elastic_net(seed: int) -> Target:
    """A linear map at the optimum of the mean squared error plus ridge and smooth L1."""

    def penalty(theta: Tensor) -> Tensor:
        huber = F.smooth_l1_loss(theta, torch.zeros_like(theta), beta=BETA, reduction="sum")
        return RIDGE * theta.square().sum() + LASSO * huber

    model, (X, y) = _linear_map(seed)
    minimise(lambda: F.mse_loss(model(X), y) + penalty(model.weight), [model.weight], **ENOUGH)
    return endpoint_target(Objective(model, F.mse_loss, (X, y)))


def diagonal_network(seed: int, size: int = 200, examples: int = 80) -> Target:
    """Gradient descent on β = u² − v² from u = v = α, for a dense teacher."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(examples, size, generator=generator).double()
    y = X @ torch.randn(size, 1, generator=generator).double()
    u = v = torch.full((size, 1), ALPHA, dtype=torch.float64)
    positions, rate = [], 2e-3
    for _ in range(600):
        beta = u * u - v * v
        positions.append({"weight": beta.T})
        slope = 2 * X.T @ (X @ beta - y) / examples
        u, v = u - 2 * rate * u * slope, v + 2 * rate * v * slope
    model = _linear(size, 1)
    path = Trajectory.from_positions(positions, rate)
    return accumulated_target(Objective(model, F.mse_loss, (X, y)), path)


def adamw(seed: int, steps: int = 1000) -> Target:
    """A linear map, trained on the full batch by AdamW until it is at rest."""
    model, (X, y) = _linear_map(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.02, betas=(0.9, 0.99), eps=EPS, weight_decay=DECAY
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(X), y).backward()
        optimizer.step()
        schedule.step()
    return endpoint_target(Objective(model, F.mse_loss, (X, y)))


def power_law(seed: int) -> Target:
    """A linear map at the optimum of the mean squared error plus λ Σ|θ|^p.

    It is minimised in z with θ = sign(z) z², where |θ|^1.5 = |z|³ has second derivatives.
    """
    model, (X, y) = _linear_map(seed)
    z = torch.linalg.lstsq(X, y).solution.T
    z = z.sign() * z.abs().sqrt()

    def penalised() -> Tensor:
        return F.mse_loss(X @ (z * z.abs()).T, y) + STRENGTH * z.abs().pow(2 * POWER).sum()

    minimise(penalised, [z], **ENOUGH)
    params = {"weight": (z * z.abs()).detach()}
    return endpoint_target(Objective(model, F.mse_loss, (X, y)), params=params)


def _linear_map(seed: int) -> tuple[nn.Linear, tuple[Tensor, Tensor]]:
    """A linear map from 40 inputs to eight outputs, zero at first, and 200 examples of a teacher.

    Its weights are Gaussian, and the targets have no noise.
    """
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(200, 40, generator=generator).double()
    return _linear(40, 8), (X, X @ torch.randn(40, 8, generator=generator).double())


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer of zeros; the global random state stays as it is."""
    with torch.random.fork_rng():
        model = nn.Linear(inputs, outputs, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


def _net_law(x: float) -> float:
    return 2 * RIDGE * x + LASSO * max(-1.0, min(1.0, x / BETA))


PANELS = {
    "elastic net": Panel(elastic_net, _net_law, even=False),
    "diagonal network": Panel(
        diagonal_network, lambda x: math.asinh(x / (2 * ALPHA**2)) / 4, even=True
    ),
    "AdamW": Panel(adamw, lambda x: EPS * DECAY * x / (1 - DECAY * abs(x)), even=True),
    "power law": Panel(
        power_law,
        lambda x: math.copysign(STRENGTH * POWER * abs(x) ** (POWER - 1), x),
        even=True,
    ),
}
"""All panels by name, in the order of the figure."""
