"""Moments of an activation φ(x), entry by entry, for skewed x.

x is a shifted log-normal variable of given mean, standard deviation and skewness, reflected where
the skewness is negative. It is a function of a standard normal ξ,

    x = m + s w(ξ),  w = (exp(tξ − t²/2) − 1)/y,  y² = exp(t²) − 1,  skewness y³ + 3y,

and Gaussian for y → 0. With He_k the Hermite polynomials,

    φ(x) = Σ_k c_k He_k(ξ)/k!,  c_k = E[φ(x) He_k(ξ)] = s E[φ'(x) w'(ξ) He_{k−1}(ξ)],

so that Cov(φ(x_i), φ(x_j)) = Σ_{k≥1} c_k(i) c_k(j) ρ_ij^k/k! for entries whose ξ have correlation
ρ_ij. All moments of ReLU have a closed form. Those of smooth activations are by
quadrature. Both are in float64: nothing here is larger than the activations themselves.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

TERMS = 3
"""Hermite terms of covariances; variances are exact."""
NODES = 49
"""Nodes of the quadrature for smooth activations."""
FARTHEST = 30.0
"""Standard deviations from the mean beyond which there is nothing."""
SMALL = 0.05
"""Between −SMALL and SMALL, where their formulas would cancel, moments are linear in y."""
LARGEST_SKEWNESS = 2.0
"""Skewness beyond which the leading order that it is computed to says nothing."""


class Moments(NamedTuple):
    """Moments of h = φ(x), each of the shape of x."""

    mean: Tensor
    variance: Tensor
    third: Tensor
    """E h³."""
    covariance_with_square: Tensor
    """Cov(h, h²)."""
    slope: Tensor
    """E φ'(x)."""
    bend: Tensor
    """E φ''(x)."""
    square_slope: Tensor
    """E (φ²)'(x)."""
    coefficients: tuple[Tensor, ...]
    """c_1, …, c_TERMS."""

    @property
    def second(self) -> Tensor:
        """E h²."""
        return self.variance + self.mean.square()


class SkewedNormal(NamedTuple):
    """x = m + s w(ξ) in float64, with w's parameters y and t."""

    m: Tensor
    s: Tensor
    y: Tensor
    t: Tensor


def skewed_normal(m: Tensor, s: Tensor, skewness: Tensor) -> SkewedNormal:
    """The variable of these means, standard deviations and skewnesses."""
    bounded = skewness.double().clamp(-LARGEST_SKEWNESS, LARGEST_SKEWNESS)
    y = 2 * torch.sinh(torch.asinh(bounded / 2) / 3)  # solves y³ + 3y = skewness
    return _with_gain(m.double(), s.double(), y)


def _with_gain(m: Tensor, s: Tensor, y: Tensor) -> SkewedNormal:
    return SkewedNormal(m, s, y, torch.log1p(y.square()).sqrt() * y.sign())


def activation_moments(
    activation: nn.Module | None, x: SkewedNormal, scale: Tensor | float, dtype: torch.dtype
) -> Moments:
    """The moments of φ(cx)/c, c the scale, in a dtype. Without activation φ is the identity."""

    def of(y: Tensor) -> Moments:
        variable = _with_gain(x.m, x.s, y)
        if activation is None:
            return _identity(variable)
        if isinstance(activation, nn.ReLU):  # its scale has no effect
            return _relu(variable)
        return _smooth(activation, variable, scale)

    small = x.y.abs() < SMALL
    ends = torch.full_like(x.y, SMALL)
    share = torch.where(small, (SMALL - x.y) / (2 * SMALL), torch.zeros_like(x.y))
    at, mirrored = of(torch.where(small, ends, x.y)), of(-ends)

    def blend(a: Tensor, b: Tensor) -> Tensor:
        return (a + share * (b - a)).to(dtype)

    coefficients = tuple(map(blend, at.coefficients, mirrored.coefficients))
    fields = {n: blend(getattr(at, n), getattr(mirrored, n)) for n in Moments._fields[:-1]}
    return Moments(**fields, coefficients=coefficients)


def _identity(x: SkewedNormal) -> Moments:
    m, s, y, t = x
    one, variance = torch.ones_like(m), s**2
    cube = s**3 * (y**3 + 3 * y)
    third = m**3 + 3 * m * variance + cube
    coefficients = tuple(s * t**k / y for k in range(1, TERMS + 1))
    return Moments(m, variance, third, 2 * m * variance + cube, one, 0 * m, 2 * m, coefficients)


def _relu(x: SkewedNormal) -> Moments:
    """With a = m − s/y, φ(x) is a + (s/y) exp(tξ − t²/2) for ξ above a root, and zero below."""
    m, s, y, t = x
    lift = (-y * m / s).clamp_min(-1 + 1e-12)  # exp(tξ − t²/2) − 1 at the root
    root = ((torch.log1p(lift) + t**2 / 2) / t).clamp(-FARTHEST, FARTHEST)
    above = -y * m / s <= -1 + 1e-12  # x has the same sign everywhere: that of y
    root = torch.where(above, -y.sign() * FARTHEST, root)
    d = root - t
    P0, P1, P2, P3 = (torch.erfc((root - k * t) / math.sqrt(2)) / 2 for k in range(4))
    p = torch.exp(-d.square() / 2) / math.sqrt(2 * math.pi)
    A, growth = s / y, torch.exp(t**2)
    a = m - A
    mean = a * P0 + A * P1
    second = a**2 * P0 + 2 * a * A * P1 + A**2 * growth * P2
    third = a**3 * P0 + 3 * a**2 * A * P1 + 3 * a * A**2 * growth * P2 + A**3 * growth**3 * P3
    # E[exp(tξ − t²/2) He_k(ξ) 1(ξ > root)] = E[He_k(ξ + t) 1(ξ > d)], by binomial sums.
    above_d = (P1, p, d * p)
    coefficients = tuple(
        A * t * torch.stack([math.comb(k, j) * t**j * above_d[k - j] for j in range(k + 1)]).sum(0)
        for k in range(TERMS)
    )
    density = torch.exp(-root.square() / 2) / math.sqrt(2 * math.pi)
    bend = density / (A * t * (1 + lift))  # the density of x at zero
    variance = (second - mean**2).clamp_min(0)
    return Moments(mean, variance, third, third - mean * second, P0, bend, 2 * mean, coefficients)


def _smooth(activation: nn.Module, x: SkewedNormal, scale: Tensor | float) -> Moments:
    nodes, weights, polynomials = (rule.to(x.m.device) for rule in _normal_rule())
    m, s, y, t = (part.unsqueeze(-1) for part in x)
    c = scale.unsqueeze(-1) if isinstance(scale, Tensor) else scale
    growth = torch.expm1(t * nodes - t**2 / 2)
    inputs = m + s * growth / y
    values, slopes, bends = _with_derivatives(activation, c * inputs)
    values, bends = values / c, bends * c

    def expect(f: Tensor) -> Tensor:
        return f @ weights

    mean = expect(values)
    centred = values - mean.unsqueeze(-1)
    variance = expect(centred.square())
    squares = values.square()
    along = slopes * s * t * (1 + growth) / y  # dh/dξ
    return Moments(
        mean,
        variance,
        expect(values**3),
        expect(centred * (squares - expect(squares).unsqueeze(-1))),
        expect(slopes),
        expect(bends),
        2 * expect(values * slopes),
        tuple(expect(along * polynomial) for polynomial in polynomials),
    )


def _with_derivatives(activation: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """φ(x), φ'(x) and φ''(x)."""
    y = activation(x)
    if isinstance(activation, nn.Tanh):
        slope = 1 - y.square()
        return y, slope, -2 * y * slope
    assert isinstance(activation, nn.GELU)
    if activation.approximate == "none":
        density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
        slope = torch.erfc(-x / math.sqrt(2)) / 2 + x * density
        return y, slope, (2 - x.square()) * density
    # x (1 + tanh u)/2
    root = math.sqrt(2 / math.pi)
    th = torch.tanh(root * (x + 0.044715 * x**3))
    du, d2u = root * (1 + 0.134145 * x**2), root * 0.26829 * x
    inner = 1 - th.square()
    slope = (1 + th) / 2 + x * inner * du / 2
    bend = inner * du + x * inner * (d2u - 2 * th * du.square()) / 2
    return y, slope, bend


@cache
def _normal_rule() -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and weights for normal expectations, and He_0, …, He_{TERMS−1} at the nodes.

    The trapezoidal rule: for functions that are steep within a standard deviation it is far more
    accurate than Gauss–Hermite quadrature.
    """
    nodes = np.linspace(-6, 6, NODES)
    weights = np.exp(-(nodes**2) / 2)
    polynomials = np.polynomial.hermite_e.hermevander(nodes, TERMS - 1).T
    return torch.tensor(nodes), torch.tensor(weights / weights.sum()), torch.tensor(polynomials)
