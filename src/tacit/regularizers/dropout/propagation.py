"""Mean, covariance and third cumulants of a chain's outputs under random masks.

Layer by layer, x is taken as Gaussian with mean m and covariance C before each activation. A mask
multiplies the activations h by 1 + δ, with δ independent, E δ = 0, E δ² = r = q/(1−q) and
E δ³ = q(2q−1)/(1−q)². So y = h(1+δ) has

    E y = E h,  Cov y = Cov h + r diag(E h²),

and by the law of total cumulance, for directions a, b, c,

    κ(a·y, b·y, c·y) = κ(a·h, b·h, c·h) + E δ³ Σ_k a_k b_k c_k E h_k³
                       + r Σ_k [Cov(a·h, b_k c_k h_k²) + the same with b, and with c, in a's place].

For h = φ(x), to leading order in C,

    Cov(h_j, h_k²) = E φ'(x_j) C_jk E (φ²)'(x_k) for j ≠ k, and exact for j = k,
    κ(a·h, b·h, c·h) = κ(a'·x, b'·x, c'·x) + Σ_k E φ''(x_k) [a_k (Cb')_k (Cc')_k + …],

with a' = a E φ'(x). So directions are followed back from the outputs, and every layer adds its
part: that of the masks themselves (negative for q < ½, along the mean outputs), and that of earlier
noise which scales later noise (positive).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.objective.params import Params
from tacit.regularizers.dropout.activations import Moments, activation_moments
from tacit.regularizers.dropout.chain import Chain, Linear, Unit, linear


class Mask(NamedTuple):
    """E δ² and E δ³ of a mask; numbers, or (members, 1, 1)."""

    variance: Tensor | float
    third: Tensor | float


class UnitState(NamedTuple):
    """What a unit did: the moments of h, the covariance of x before it, and its mask."""

    moments: Moments
    covariance: Tensor | None
    """None where x is not random."""
    mask: Mask


class OutputMoments(NamedTuple):
    """Mean and covariance of the outputs, and the layers on the way to them."""

    mean: Tensor
    covariance: Tensor
    layers: list[Tensor | UnitState]
    """Weights of linear layers and states of units, from the first that is random on."""


def output_moments(chain: Chain, params: Params, x: Tensor, rate: Tensor | None) -> OutputMoments:
    """Moments of the outputs for inputs x (…, examples, features).

    Args:
        chain: the steps.
        params: the parameters by name; with members, one more dimension in front.
        x: the inputs; with members (members, examples, features).
        rate: None for the rates of the chain, or one rate per member, for all dropout layers.
    """
    mean, covariance, layers = x, None, []
    for step in chain.steps:
        if isinstance(step, Linear):
            weight, bias = step.of(params)
            mean = linear(mean, weight, bias)
            if layers:
                covariance = _through_linear(covariance, layers[-1], weight)
                layers.append(weight)
        else:
            mean, covariance = _through_unit(step, mean, covariance, layers, rate)
    if isinstance(layers[-1], UnitState):
        covariance = _with_mask(covariance, layers[-1])
    assert covariance is not None
    return OutputMoments(mean, covariance, layers)


def _through_linear(
    covariance: Tensor | None, before: Tensor | UnitState, weight: Tensor
) -> Tensor:
    W = weight.unsqueeze(-3) if weight.ndim > 2 else weight  # the same for all examples
    if isinstance(before, UnitState):
        if covariance is None:  # only the mask is random
            return (W * _mask_variance(before).unsqueeze(-2)) @ W.mT
        covariance = _with_mask(covariance, before)
    assert covariance is not None
    return (covariance @ W.mT).mT @ W.mT


def _through_unit(
    unit: Unit,
    mean: Tensor,
    covariance: Tensor | None,
    layers: list[Tensor | UnitState],
    rate: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Mean and covariance of h; appends the unit's state from the first mask on."""
    kept_before, kept = unit.keep(None if rate is None else rate.view(-1, 1, 1))
    mask = Mask(1 / kept - 1, (1 - kept) * (1 - 2 * kept) / kept**2)
    if covariance is None:
        h = mean if unit.activation is None else unit.activation(mean / kept_before) * kept_before
        zero = torch.zeros_like(h)
        moments = Moments(h, zero, h**3, zero, zero, zero, zero, ())
        if unit.random:
            layers.append(UnitState(moments, None, mask))
        return h, None
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    smallest = torch.finfo(variance.dtype).tiny ** 0.5
    s = variance.clamp_min(smallest).sqrt()
    moments = activation_moments(unit.activation, mean, s, 1 / kept_before)
    layers.append(UnitState(moments, covariance, mask))
    if unit.activation is None:
        return mean, covariance
    return moments.mean, _activation_covariance(moments, covariance, s)


def _activation_covariance(moments: Moments, covariance: Tensor, s: Tensor) -> Tensor:
    """Σ_k c_k c_kᵀ ρ^k/k! off the diagonal, by Horner's rule, and the variances on it."""
    rho = covariance / (s.unsqueeze(-1) * s.unsqueeze(-2))
    total: Tensor | None = None
    for k in range(len(moments.coefficients), 0, -1):
        c = moments.coefficients[k - 1] / math.sqrt(math.factorial(k))
        term = c.unsqueeze(-1) * c.unsqueeze(-2)
        total = term if total is None else torch.addcmul(term, total, rho)
    assert total is not None
    total = total * rho
    rest = moments.variance - total.diagonal(dim1=-2, dim2=-1)
    return total + torch.diag_embed(rest)


def _mask_variance(state: UnitState) -> Tensor:
    return state.mask.variance * state.moments.second


def _with_mask(covariance: Tensor | None, state: UnitState) -> Tensor:
    if covariance is not None and isinstance(state.mask.variance, float) and not state.mask.variance:
        return covariance
    diagonal = torch.diag_embed(_mask_variance(state))
    return diagonal if covariance is None else covariance + diagonal


def third_cumulants(outputs: OutputMoments, directions: Tensor) -> Tensor:
    """κ(d_0·z, d_j·z, d_j·z) of the outputs z for every row d_j of directions (…, rows, outputs)."""
    total = torch.zeros_like(directions[..., 0])
    a = directions
    for layer in reversed(outputs.layers):
        if isinstance(layer, Tensor):
            a = a @ (layer.unsqueeze(-3) if layer.ndim > 2 else layer)
            continue
        moments, covariance, mask = layer
        first, squares = a[..., :1, :], a.square()
        products = first * squares
        by_unit = _row(mask.third * moments.third)
        if covariance is not None:
            slope, bend = _row(moments.slope), _row(moments.bend)
            back = a * slope
            Ca = back @ covariance
            variance = covariance.diagonal(dim1=-2, dim2=-1)
            diagonal = moments.skew - moments.slope * moments.square_slope * variance
            by_unit = by_unit + _row(3 * mask.variance * diagonal)
            across = Ca[..., :1, :] * squares + 2 * Ca * first * a
            total = total + (across * _row(mask.variance * moments.square_slope)).sum(-1)
            curved = first * Ca.square() + 2 * a * Ca[..., :1, :] * Ca
            total = total + (curved * bend).sum(-1)
            a = back
        total = total + (products * by_unit).sum(-1)
    return total


def _row(x: Tensor) -> Tensor:
    return x.unsqueeze(-2)
