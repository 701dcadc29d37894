"""The paper's least-squares problem: data, gradient descent from zero, stopping, equations.

Random numbers are drawn in float32, as published, and converted to float64. A step of descent is
θ += (η/n) Xᵀ(y − Xθ), which is the step that `tacit.theory.early_stopping` is exact for.
Trap: this is half the gradient of the mean squared error, so η here is torch's learning rate on
`mse_loss` times two.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.equations.equations import Equations
from tacit.equations.target import endpoint_equations
from tacit.objective.objective import Objective
from tacit.regularizers import Regularizer

SEED = 56
EXAMPLES, SIZE = 1000, 10
SCALE = 3.0
"""Standard deviation of the true coefficients."""


class Regression(NamedTuple):
    """Inputs (n×p), true coefficients (p) and observations (n), in float64."""

    X: Tensor
    coefficients: Tensor
    y: Tensor


class Descent(NamedTuple):
    """Gradient descent from zero on m columns of observations at once."""

    iterates: Tensor
    """Weights after t steps, shape (steps + 1, p, m)."""
    losses: Tensor
    """Mean squared error after t steps, shape (steps + 1, m)."""


def draw(
    seed: int = SEED, noise: float = 1.0, *, examples: int = EXAMPLES, size: int = SIZE
) -> Regression:
    """Draw inputs, then coefficients, then noise, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(examples, size, generator=generator).double()
    return Regression(X, *_observe(X, generator, noise))


def redraw(X: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Draw new coefficients and observations for the same inputs."""
    return _observe(X, torch.Generator().manual_seed(seed), noise=1.0)


def endpoint_seed(pool: int, index: int, seed: int = SEED) -> int:
    """The published seed of one endpoint of a pool."""
    return seed + 100 + 10_000 * pool + index


def draw_pool(X: Tensor, pool: int, count: int, *, seed: int = SEED) -> Tensor:
    """Draw the observations of `count` endpoints of a pool, one column each (n×count)."""
    return torch.stack([redraw(X, endpoint_seed(pool, k, seed))[1] for k in range(count)], dim=1)


def descend(
    X: Tensor,
    Y: Tensor,
    step: float,
    steps: int,
    dtype: torch.dtype = torch.float64,
    *,
    weights: Tensor | None = None,
) -> Descent:
    """Descend from zero for every column of Y (n×m, or n for one column) at once.

    Args:
        X: inputs, n×p.
        Y: observations.
        step: η of θ += (η/n) Xᵀ(y − Xθ); with weights, of (η/Σw) Xᵀ diag(w) (y − Xθ).
        steps: number of steps.
        dtype: the precision of the descent and of what is returned.
        weights: one weight per example, in Y's shape (for example the counts of a resample).
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
    return Descent(iterates, losses)


def stopping_times(losses: Tensor, *, patience: int, min_delta: float) -> list[int]:
    """The step at which each column of losses (steps + 1, m) stops; the last step if it never does.

    A step improves if its loss is below the best so far by more than `min_delta`. Training stops
    after `patience` consecutive steps without improvement.
    """
    best, waited = losses[0].clone(), torch.zeros(losses.shape[1], dtype=torch.long)
    stops = torch.full_like(waited, len(losses) - 1)
    running = torch.ones_like(waited, dtype=torch.bool)
    for t in range(1, len(losses)):
        improved = losses[t] < best - min_delta
        best = torch.where(improved, losses[t], best)
        waited = torch.where(improved, 0, waited + 1)
        stopping = running & (waited >= patience)
        stops[stopping] = t
        running &= ~stopping
    return stops.tolist()


def objective(X: Tensor, y: Tensor) -> Objective:
    """(1/n)‖y − Xθ‖² as an objective of the parameter `weight` (1×p)."""
    model = nn.Linear(X.shape[1], 1, bias=False, dtype=X.dtype)
    return Objective(model, F.mse_loss, (X, y.reshape(-1, 1)))


def as_params(theta: Tensor) -> dict[str, Tensor]:
    """Weights as parameters of `objective`, converted to float64."""
    return {"weight": theta.double().reshape(1, -1)}


def equations(X: Tensor, y: Tensor, theta: Tensor, regularizer: Regularizer) -> Equations:
    """The equations of one endpoint."""
    return endpoint_equations(objective(X, y), regularizer, params=as_params(theta))


def penalised_solution(X: Tensor, y: Tensor, penalty: Tensor) -> Tensor:
    """The stationary point of (1/n)‖y − Xθ‖² + θᵀΛθ.

    Setting the gradient 2(XᵀX/n + Λ)θ − 2Xᵀy/n to zero gives θ = (XᵀX/n + Λ)⁻¹ Xᵀy/n.
    Trap: this is a minimum only where XᵀX/n + Λ is positive definite.
    """
    return torch.linalg.solve(X.T @ X / len(X) + penalty, X.T @ y / len(X))


def relative_error(estimate: Tensor, truth: Tensor) -> float:
    """‖estimate − truth‖ / ‖truth‖ in the Frobenius norm."""
    return float((estimate - truth).norm() / truth.norm())


def _observe(X: Tensor, generator: torch.Generator, noise: float) -> tuple[Tensor, Tensor]:
    coefficients = SCALE * torch.randn(X.shape[1], generator=generator).double()
    epsilon = noise * torch.randn(len(X), generator=generator).double()
    return coefficients, X @ coefficients + epsilon
