"""The expected loss of outputs with given mean, covariance and skewness, by quadrature.

Outputs z of mean m and covariance C are written as

    z = m + (Cu/σ) w(ξ) + v(ξ) e,  σ² = uᵀCu,  u = m/‖m‖,

where ξ is standard normal and e is independent of it, normal, of covariance C − Cu(Cu)ᵀ/σ². The
function w makes a shifted log-normal variable of mean 0, variance 1 and the skewness of u·z,
reflected where that is negative:

    w = (exp(tξ − t²/2) − 1)/y,  y² = exp(t²) − 1,  skewness y³ + 3y.

The scale v = exp(bξ − b²), with E v² = 1, gives e the mean covariance of its square with u·z that
the masks give it: E w v² = (exp(2bt) − 1)/y. For y → 0 and b → 0 this is the Gaussian. Mean and
covariance are matched for any skewness, by the nodes of the quadrature too: the expectation of a
quadratic loss is exact.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.losses import Loss
from tacit.regularizers.dropout.propagation import OutputMoments, third_cumulants

Losses = Callable[[Tensor, Any], Tensor]
"""losses(outputs, target): outputs (…, examples, nodes, points, outputs); see `losses_of`."""

GAIN_NODES = 8
"""Gauss–Hermite nodes for ξ."""
PAIRS = 32
"""Fewest antithetic pairs of points for e."""
SMALLEST = 1e-3
"""Least |y|: w is Gaussian to within this skewness."""


def points_per_example(outputs: int) -> int:
    """How many points the quadrature of one example has."""
    return GAIN_NODES * 2 * max(PAIRS, outputs)


def expected_losses(
    losses: Losses, moments: OutputMoments, target: Any, *, centred: bool
) -> Tensor:
    """E ℓ(z) of every example.

    Args:
        losses: losses(outputs, target) for outputs (…, examples, nodes, points, outputs) returns the
            mean over points, (…, examples, nodes).
        moments: the moments of z.
        target: the examples' targets.
        centred: whether the loss does not change if one number is added to all outputs, as
            cross-entropy does not. That direction is then left out of z.
    """
    dtype = moments.mean.dtype
    m, C = moments.mean.double(), moments.covariance.double()
    count = m.shape[-1]
    view = torch.eye(count, dtype=m.dtype, device=m.device)
    if centred and count > 1:
        view = view - 1 / count
        m, C = m @ view, view @ C @ view
    size = C.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    floor = torch.finfo(dtype).eps * size + torch.finfo(torch.float32).tiny
    u = m / (m.square().sum(-1, keepdim=True) + floor).sqrt()
    Cu = (C @ u.unsqueeze(-1)).squeeze(-1)
    variance = (u * Cu).sum(-1, keepdim=True) + floor
    along = Cu / variance.sqrt()
    rest = C - along.unsqueeze(-1) * along.unsqueeze(-2)
    skewness, shared = _skewness(moments, view, u, Cu, variance, rest, floor)
    w, v, weights = _gains(skewness, shared)
    e = _factor(rest, floor.unsqueeze(-1)) @ _points(count).to(m)  # (…, outputs, points)
    z = (
        (m.unsqueeze(-2) + w.unsqueeze(-1) * along.unsqueeze(-2)).unsqueeze(-2)
        + v[..., None, None] * e.mT.unsqueeze(-3)
    ).to(dtype)
    return losses(z, target) @ weights.to(dtype)


def _skewness(
    moments: OutputMoments,
    view: Tensor,
    u: Tensor,
    Cu: Tensor,
    variance: Tensor,
    rest: Tensor,
    floor: Tensor,
) -> tuple[Tensor, Tensor]:
    """Skewness of u·z, and the standardised covariance of u·z with ‖e‖²."""
    residual = view - (Cu / variance).unsqueeze(-1) * u.unsqueeze(-2)
    directions = torch.cat([u.unsqueeze(-2), residual], dim=-2)
    cumulants = third_cumulants(moments, directions.to(moments.mean.dtype)).double()
    sigma = variance.squeeze(-1).sqrt()
    spread = rest.diagonal(dim1=-2, dim2=-1).sum(-1) + floor.squeeze(-1)
    return cumulants[..., 0] / sigma**3, cumulants[..., 1:].sum(-1) / (sigma * spread)


def _gains(skewness: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w and v at the nodes of ξ, (…, examples, nodes), and the weights of the nodes."""
    nodes, weights = (t.to(skewness) for t in _gain_rule())
    y = 2 * torch.sinh(torch.asinh(skewness / 2) / 3)  # solves y³ + 3y = skewness
    y = torch.where(y.abs() < SMALLEST, torch.full_like(y, SMALLEST), y).unsqueeze(-1)
    t = torch.log1p(y.square()).sqrt() * y.sign()
    b = torch.log1p((y * shared.unsqueeze(-1)).clamp_min(-0.9)) / (2 * t)
    w = torch.expm1(t * nodes - t.square() / 2) / y
    w = w - (w @ weights).unsqueeze(-1)
    w = w / (w.square() @ weights).sqrt().unsqueeze(-1)
    v = torch.exp(b * nodes - b.square())
    return w, v / (v.square() @ weights).sqrt().unsqueeze(-1), weights


def _factor(rest: Tensor, floor: Tensor) -> Tensor:
    """L with LLᵀ = rest, up to rounding: rest is singular, at least along u."""
    identity = torch.eye(rest.shape[-1], dtype=rest.dtype, device=rest.device)
    jitter = floor
    for _ in range(6):
        factor, failed = torch.linalg.cholesky_ex(rest + jitter * identity)
        if not failed.any():
            return factor
        jitter = torch.where(failed.bool()[..., None, None], 10 * jitter, jitter)
    raise InputError(
        "the covariance of the outputs under dropout is not positive semidefinite beyond rounding: "
        "evaluate the model in a wider dtype, such as model.double()."
    )


@cache
def _gain_rule() -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(GAIN_NODES)
    return torch.tensor(nodes), torch.tensor(weights / weights.sum())


@cache
def _points(outputs: int) -> Tensor:
    """Antithetic points (outputs, points) of mean zero and covariance exactly 1, from one seed."""
    pairs = max(PAIRS, outputs)
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(pairs, outputs, generator=generator, dtype=torch.float64)
    points = math.sqrt(pairs) * torch.linalg.qr(normal).Q.T
    return torch.cat([points, -points], dim=1)


def losses_of(loss: Loss) -> Losses:
    """A mean-reduced loss as losses(outputs, target) of every example and node.

    Outputs are (…, examples, nodes, points, outputs), targets (…, examples, …): the loss sees the
    points of one example and node as a batch, with the example's target for each.
    """

    def of_points(z: Tensor, target: Tensor) -> Tensor:
        return loss(z, target.expand(len(z), *target.shape))

    def losses(z: Tensor, target: Tensor) -> Tensor:
        *leading, nodes, _, _ = z.shape
        targets = target.flatten(0, len(leading) - 1).repeat_interleave(nodes, dim=0)
        try:
            values = torch.func.vmap(of_points)(z.flatten(0, -3), targets)
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
        return values.view(*leading, nodes)

    return losses
