"""The expected loss of outputs with given mean, covariance and third cumulants, by quadrature.

With C = AAᵀ, T the third cumulants of A⁻¹z, and ξ standard normal, outputs z of mean m and
covariance C are written as a quadratic function of ξ (the expansion of Cornish and Fisher),

    z = m + Bξ + A Q,  Q_i = Σ_jk T_ijk (ξ_j ξ_k − δ_jk)/6,  BBᵀ = C − A Cov(Q) Aᵀ,

which has these third cumulants to leading order. The expectation is a mean over antithetic points
ξ, the same for all examples, of mean zero and covariance exactly one, and Cov(Q) is that over the
points. So mean and covariance of z are matched for any T, and the expectation of a quadratic loss
is exact.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.losses import Loss
from tacit.regularizers.dropout.propagation import OutputMoments, third_cumulants

Losses = Callable[[Tensor, Any], Tensor]
"""losses(outputs, target): outputs (…, examples, points, outputs); see `losses_of`."""

PAIRS = 256
"""Fewest antithetic pairs of points."""
MOST_SKEWED = 32
"""Most outputs for which third cumulants are computed; more outputs are Gaussian."""
RIDGE = 1e-4
"""Directions with less than this part of the mean variance have little skewness in the model."""
JITTER = 4e-11
"""Part of the mean variance that is added to C at least. C is singular if there are more outputs
than hidden units, and the derivative of its factor would be made of rounding errors."""
LARGEST_SHARE = 0.9
"""Largest share of Q in the variance of any direction; where it is larger, T is made smaller."""


def points_per_example(outputs: int) -> int:
    """How many points the quadrature of one example has."""
    return 2 * max(PAIRS, outputs)


def expected_losses(losses: Losses, moments: OutputMoments, target: Any) -> Tensor:
    """E ℓ(z) of every example, for outputs z of these moments."""
    dtype = moments.mean.dtype
    C = moments.covariance.double()
    count = C.shape[-1]
    identity = torch.eye(count, dtype=C.dtype, device=C.device)
    size = C.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] + 1e-20
    points = _points(count).to(C)  # (outputs, points)
    quadratic = torch.zeros((), dtype=C.dtype, device=C.device)
    if count <= MOST_SKEWED:
        A = torch.linalg.cholesky(C + RIDGE * size * identity)
        quadratic = A @ _quadratic_part(moments, A, points)
        C = C - quadratic @ quadratic.mT / points.shape[1]
    B = _factor(C, max(torch.finfo(dtype).eps, JITTER) * size * identity)
    z = moments.mean.unsqueeze(-2) + (B @ points + quadratic).mT.to(dtype)
    return losses(z, target)


def _quadratic_part(moments: OutputMoments, A: Tensor, points: Tensor) -> Tensor:
    """Q at all points, (…, outputs, points), with mean zero."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    directions = torch.linalg.solve_triangular(A, identity.expand_as(A), upper=False)
    T = third_cumulants(moments, directions.to(moments.mean.dtype)).double()
    products = (points.unsqueeze(0) * points.unsqueeze(1)).flatten(0, 1)
    Q = T.flatten(-2) @ (products - products.mean(1, keepdim=True)) / 6
    largest = torch.linalg.eigvalsh(Q @ Q.mT / points.shape[1])[..., -1]
    shrink = (LARGEST_SHARE / largest.clamp_min(LARGEST_SHARE)).sqrt()
    return Q * shrink[..., None, None]


def _factor(C: Tensor, jitter: Tensor) -> Tensor:
    """B with BBᵀ = C, up to rounding: C may be singular."""
    for _ in range(8):
        factor, failed = torch.linalg.cholesky_ex(C + jitter)
        if not failed.any():
            return factor
        jitter = torch.where(failed.bool()[..., None, None], 10 * jitter, jitter)
    raise InputError(
        "the covariance of the outputs under dropout is not positive semidefinite beyond rounding: "
        "evaluate the model in a wider dtype, such as model.double()."
    )


@cache
def _points(outputs: int) -> Tensor:
    """Antithetic points (outputs, points) of mean zero and covariance exactly 1, from one seed.

    They are those of a scrambled Sobol sequence, as normal quantiles, made orthogonal.
    """
    pairs = max(PAIRS, outputs)
    sobol = torch.quasirandom.SobolEngine(outputs, scramble=True, seed=0)
    normal = torch.special.ndtri(sobol.draw(pairs, dtype=torch.float64).clamp(1e-6, 1 - 1e-6))
    points = math.sqrt(pairs) * torch.linalg.qr(normal).Q.T
    return torch.cat([points, -points], dim=1)


def losses_of(loss: Loss) -> Losses:
    """A mean-reduced loss as losses(outputs, target) of every example, the mean over its points.

    Outputs are (…, examples, points, outputs), targets (…, examples, …): the loss sees the points
    of one example as a batch, with the example's target for each.
    """

    def of_points(z: Tensor, target: Tensor) -> Tensor:
        return loss(z, target.expand(len(z), *target.shape))

    def losses(z: Tensor, target: Tensor) -> Tensor:
        *leading, _, _ = z.shape
        try:
            values = torch.func.vmap(of_points)(
                z.flatten(0, -3), target.flatten(0, len(leading) - 1)
            )
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise InputError(
                "the loss cannot be computed for the points of one example at a time, which "
                f"dropout_moments needs ({error}). Use a loss of tensors (outputs, target) that "
                "torch.func.vmap can map, such as torch's own."
            ) from error
        if values.ndim != 1:
            raise InputError(
                f"the loss of a batch has shape {tuple(values.shape[1:])}: dropout_moments needs a "
                "mean-reduced loss, a scalar."
            )
        return values.view(leading)

    return losses
