"""Least squares as the paper draws it: data, gradient descent from zero, stopping, equations.

Draws are made in float32, as published, and everything after them in float64. A step of descent is
θ += (η/n) Xᵀ(y − Xθ), the one for which `tacit.theory.early_stopping` is exact.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.equations.endpoint import endpoint_equations
from tacit.equations.equations import Equations
from tacit.objective.objective import Objective
from tacit.regularizers import Regularizer

SEED = 56
EXAMPLES, SIZE = 1000, 10
SCALE = 3.0
"""Standard deviation of the true coefficients."""


class Problem(NamedTuple):
    """Inputs (n×p), true coefficients (p) and observations (n), in float64."""

    X: Tensor
    coefficients: Tensor
    y: Tensor


class Path(NamedTuple):
    """Gradient descent from zero, for several right-hand sides at once."""

    iterates: Tensor
    """Weights after t steps, shape (steps + 1, p, m)."""
    losses: Tensor
    """Mean squared error after t steps, shape (steps + 1, m)."""


def draw(
    seed: int = SEED, noise: float = 1.0, *, examples: int = EXAMPLES, size: int = SIZE
) -> Problem:
    """X, then coefficients, then noise, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(examples, size, generator=generator).double()
    return Problem(X, *_observe(X, generator, noise))


def redraw(X: Tensor, seed: int, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """New coefficients and observations for the same inputs."""
    return _observe(X, torch.Generator().manual_seed(seed), noise)


def endpoint_seed(pool: int, index: int, seed: int = SEED) -> int:
    """The seed of an endpoint of a pool, as published."""
    return seed + 100 + 10_000 * pool + index


def pool(X: Tensor, pool: int, count: int, *, seed: int = SEED, noise: float = 1.0) -> Tensor:
    """Observations of `count` endpoints of a pool, one a column (n×count)."""
    drawn = (redraw(X, endpoint_seed(pool, k, seed), noise) for k in range(count))
    return torch.stack([y for _, y in drawn], dim=1)


def descend(
    X: Tensor,
    Y: Tensor,
    step: float,
    steps: int,
    dtype: torch.dtype = torch.float64,
    *,
    weights: Tensor | None = None,
) -> Path:
    """Descend from zero for every column of Y (n×m, or n for one) at once.

    Args:
        X: inputs, n×p.
        Y: observations.
        step: η of θ += (η/n) Xᵀ(y − Xθ); with weights, of (η/Σw) Xᵀ diag(w) (y − Xθ).
        steps: how many.
        dtype: what the descent is computed in; the path is given in it too.
        weights: one weight an example, in Y's shape (counts of a resample, say).
    """
    X, Y = X.to(dtype), Y.to(dtype).reshape(len(Y), -1)
    scale = None if weights is None else weights.to(dtype).reshape(Y.shape)
    total = len(Y) if scale is None else scale.sum(0)
    iterates = X.new_zeros(steps + 1, X.shape[1], Y.shape[1])
    losses = X.new_zeros(steps + 1, Y.shape[1])
    for t in range(steps + 1):
        residual = torch.addmm(Y, X, iterates[t], alpha=-1)
        weighted = residual if scale is None else residual * scale
        losses[t] = torch.linalg.vecdot(residual, weighted, dim=0) / total
        if t < steps:
            iterates[t + 1] = iterates[t] + X.T @ weighted * (step / total)
    return Path(iterates, losses)


def stopping_times(losses: Tensor, *, patience: int, min_delta: float) -> list[int]:
    """When each column of losses (steps + 1, m) stops, by the usual rule; the last step if never.

    A step improves if its loss is below the best so far by more than `min_delta`; training stops
    after `patience` steps in a row that do not.
    """
    best, waited = losses[0].clone(), torch.zeros(losses.shape[1], dtype=torch.long)
    stopped = torch.full_like(waited, len(losses) - 1)
    going = torch.ones_like(waited, dtype=torch.bool)
    for t in range(1, len(losses)):
        better = losses[t] < best - min_delta
        best = torch.where(better, losses[t], best)
        waited = torch.where(better, 0, waited + 1)
        now = going & (waited >= patience)
        stopped[now] = t
        going &= ~now
    return stopped.tolist()


def objective(X: Tensor, y: Tensor, *, weights: Tensor | None = None) -> Objective:
    """(1/n)‖y − Xθ‖² as an objective of the parameter `weight` (1×p)."""
    model = nn.Linear(X.shape[1], 1, bias=False, dtype=X.dtype)
    return Objective(model, F.mse_loss, (X, y.reshape(-1, 1)), weights=weights)


def point(theta: Tensor) -> dict[str, Tensor]:
    """Weights as parameters of `objective`, in float64 whatever they were trained in."""
    return {"weight": theta.double().reshape(1, -1)}


def equations(
    X: Tensor,
    y: Tensor,
    theta: Tensor,
    families: Regularizer | Sequence[Regularizer],
    *,
    weights: Tensor | None = None,
) -> Equations:
    """The equations of one endpoint."""
    return endpoint_equations(objective(X, y, weights=weights), families, params=point(theta))


def penalised(X: Tensor, y: Tensor, penalty: Tensor) -> Tensor:
    """The stationary point of (1/n)‖y − Xθ‖² + θᵀΛθ: its minimiser where XᵀX/n + Λ ≻ 0."""
    n = len(X)
    return torch.linalg.solve(X.T @ X / n + penalty, X.T @ y / n)


def relative_error(estimate: Tensor, truth: Tensor) -> float:
    """‖estimate − truth‖ / ‖truth‖, Frobenius."""
    return float((estimate - truth).norm() / truth.norm())


def _observe(X: Tensor, generator: torch.Generator, noise: float) -> tuple[Tensor, Tensor]:
    coefficients = SCALE * torch.randn(X.shape[1], generator=generator).double()
    epsilon = noise * torch.randn(len(X), generator=generator).double()
    return coefficients, X @ coefficients + epsilon
