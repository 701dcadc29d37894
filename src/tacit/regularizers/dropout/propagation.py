"""Mean, covariance and third cumulants of a chain's outputs under random masks.

A mask multiplies the activations h by 1 + δ, with δ independent, E δ = 0, E δ² = r = q/(1−q) and
E δ³ = q(2q−1)/(1−q)². So y = h(1+δ) has

    E y = E h,  Cov y = Cov h + r diag(E h²),

and by the law of total cumulance, for directions a, b, c,

    κ(a·y, b·y, c·y) = κ(a·h, b·h, c·h) + E δ³ Σ_k a_k b_k c_k E h_k³
                       + r Σ_k [Cov(a·h, b_k c_k h_k²) + the same with b, and with c, in a's place].

For h = φ(x), x of covariance C, to leading order,

    Cov(h_j, h_k²) = E φ'(x_j) C_jk E (φ²)'(x_k) for j ≠ k, and as it is for j = k,
    κ(a·h, b·h, c·h) = κ(a'·x, b'·x, c'·x) + Σ_k E φ''(x_k) [a_k (Cb')_k (Cc')_k + …],

with a' = a E φ'(x). For the outputs, directions are followed back through all layers, and each adds
its part: that of the masks themselves (negative for q < ½, along the mean outputs), and that of
earlier noise which scales later noise (positive: gains that multiply).

Hidden units are skewed for the same reason, which moves their means and variances: a unit that is
off on average is less often on than a Gaussian one. Their own third cumulants κ(x_k, x_k, x_k) are
carried forward. What the layer before leaves of its own is taken as that of noise whose scale
follows x, as under a common gain: κ(a·x, a·x, a·x) = 3 (a·τ) aᵀCa, τ_k = κ(x_k, x_k, x_k)/(3 C_kk).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.objective.params import Params
from tacit.regularizers.dropout.activations import Moments, activation_moments, skewed_normal
from tacit.regularizers.dropout.chain import Chain, Unit, linear


class Mask(NamedTuple):
    """E δ² and E δ³ of a mask; numbers, or (members, 1, 1)."""

    variance: Tensor | float
    third: Tensor | float


class Spread(NamedTuple):
    """The randomness of a layer's values x."""

    covariance: Tensor
    cubes: Tensor
    """κ(x_k, x_k, x_k) of every entry."""

    def variance(self, mean: Tensor) -> Tensor:
        """The variance of every entry, at least what rounding leaves of the layer's size.

        Entries below that are not random, as behind a layer whose activations are all zero. Their
        variance is a sum of squares which are zero, so that it has no gradient either.
        """
        variance = self.covariance.diagonal(dim1=-2, dim2=-1)
        size = (mean.square() + variance).detach().mean(-1, keepdim=True)
        eps, tiny = torch.finfo(size.dtype).eps, torch.finfo(size.dtype).tiny ** 0.5
        return variance.maximum(eps * size + tiny)


class UnitState(NamedTuple):
    """What a unit did: the moments of h, the spread of x before it, and its mask."""

    moments: Moments
    before: Spread | None
    """None where x is not random."""
    variance: Tensor
    """The variance of x, with a floor."""
    covariance: Tensor | None
    """Cov h, before the mask; None where h is not random."""
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
    mean, spread, layers = x, None, []
    last = len(chain.steps) - 1
    for i, step in enumerate(chain.steps):
        if isinstance(step, Unit):
            state = _through_unit(step, mean, spread, rate)
            mean = state.moments.mean
            if layers or step.random:
                layers.append(state)
        else:
            weight, bias = step.of(params)
            mean = linear(mean, weight, bias)
            if layers:
                spread = _through_linear(layers[-1], weight, only_covariance=i == last)
                layers.append(weight)
    if isinstance(layers[-1], UnitState):
        covariance = _with_mask(layers[-1])
    else:
        assert spread is not None
        covariance = spread.covariance
    return OutputMoments(mean, covariance, layers)


def _through_linear(state: UnitState, weight: Tensor, *, only_covariance: bool) -> Spread:
    """The spread of Wy + b for y behind a unit; the outputs need only the covariance."""
    W = weight.unsqueeze(-3) if weight.ndim > 2 else weight  # the same for all examples
    moments, before, variance, covariance, mask = state
    masked = _mask_variance(state)
    cubes = (mask.third * moments.third) @ (weight**3).mT
    if covariance is None or before is None:  # only the mask is random
        return Spread(_rows_times(W * masked.unsqueeze(-2), weight), cubes)
    product = _rows_times(_with_mask(state), weight)  # (…, in, out)
    total = _rows_times(product.mT, weight)
    if only_covariance:
        return Spread(total, cubes)
    # Cov(W_k·h, h_j²) is that with h_j, which `product` has beside the mask's part, times the
    # coefficient of the regression of h_j² on h_j.
    eps = torch.finfo(variance.dtype).eps
    ratio = moments.covariance_with_square / (moments.variance + eps * variance)
    scaled = mask.variance * ratio
    shared = (product * W.mT.square() * scaled.unsqueeze(-1)).sum(-2)
    cubes = cubes + 3 * (shared - (scaled * masked) @ (weight**3).mT)
    # What the cumulants of x leave, and what the curvature of φ adds.
    linear_part = total.diagonal(dim1=-2, dim2=-1) - masked @ weight.square().mT
    tau = before.cubes / (3 * variance)
    along = (moments.slope * tau) @ weight.mT
    inner = _rows_times(before.covariance * moments.slope.unsqueeze(-2), weight)
    bent = (inner.square() * W.mT * moments.bend.unsqueeze(-1)).sum(-2)
    return Spread(total, cubes + 3 * (along * linear_part + bent))


def _rows_times(x: Tensor, weight: Tensor) -> Tensor:
    """The product x Wᵀ for x (…, examples, rows, in), of the rows of all examples at once."""
    return (x.flatten(-3, -2) @ weight.mT).unflatten(-2, x.shape[-3:-1])


def _through_unit(
    unit: Unit, mean: Tensor, spread: Spread | None, rate: Tensor | None
) -> UnitState:
    kept_before, kept = unit.keep(None if rate is None else rate.view(-1, 1, 1))
    mask = Mask(1 / kept - 1, (1 - kept) * (1 - 2 * kept) / kept**2)
    if spread is None:
        h = mean if unit.activation is None else unit.activation(mean / kept_before) * kept_before
        zero = torch.zeros_like(h)
        fixed = Moments(h, zero, h**3, zero, zero, zero, zero, ())
        return UnitState(fixed, None, zero, None, mask)
    variance = spread.variance(mean)
    s = variance.sqrt()
    x = skewed_normal(mean, s, spread.cubes / s / s / s)
    moments = activation_moments(unit.activation, x, 1 / kept_before, mean.dtype)
    covariance = spread.covariance
    if unit.activation is not None:
        covariance = _activation_covariance(moments, covariance, s)
    return UnitState(moments, spread, variance, covariance, mask)


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


def _with_mask(state: UnitState) -> Tensor:
    covariance, variance = state.covariance, state.mask.variance
    if covariance is not None and isinstance(variance, float) and not variance:
        return covariance
    diagonal = torch.diag_embed(_mask_variance(state))
    return diagonal if covariance is None else covariance + diagonal


def third_cumulants(outputs: OutputMoments, directions: Tensor) -> Tensor:
    """κ(d_i·z, d_j·z, d_k·z) of the outputs z for all rows of directions (…, rows, outputs)."""
    a, total = directions, torch.zeros(())
    for layer in reversed(outputs.layers):
        if isinstance(layer, Tensor):
            a = a @ (layer.unsqueeze(-3) if layer.ndim > 2 else layer)
            continue
        moments, before, _, _, mask = layer
        pairs = _pairs(a)
        by_unit = mask.third * moments.third
        if before is not None:
            covariance = before.covariance
            back = a * _row(moments.slope)
            Ca = back @ covariance
            variance = covariance.diagonal(dim1=-2, dim2=-1)
            linear_part = moments.slope * moments.square_slope * variance
            by_unit = by_unit + 3 * mask.variance * (moments.covariance_with_square - linear_part)
            scaled = _cube(Ca * _row(mask.variance * moments.square_slope), pairs)
            scaled = scaled + _cube(a * _row(moments.bend), _pairs(Ca))
            total = total + scaled + scaled.transpose(-3, -2) + scaled.transpose(-3, -1)
            total = total + _cube(a * _row(by_unit), pairs)
            a = back
        else:
            total = total + _cube(a * _row(by_unit), pairs)
    return total


def _pairs(a: Tensor) -> Tensor:
    """Products of all pairs of rows, (…, rows², entries)."""
    return (a.unsqueeze(-2) * a.unsqueeze(-3)).flatten(-3, -2)


def _cube(a: Tensor, pairs: Tensor) -> Tensor:
    rows = a.shape[-2]
    return (a @ pairs.mT).unflatten(-1, (rows, rows))


def _row(x: Tensor) -> Tensor:
    return x.unsqueeze(-2)
