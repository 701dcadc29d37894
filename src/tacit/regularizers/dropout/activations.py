"""Moments of an activation φ(x) of Gaussian x, entry by entry.

With x = m + sξ, ξ standard normal, and He_k the Hermite polynomials,

    φ(m + sξ) = Σ_k c_k He_k(ξ)/k!,  c_k = E[φ(m + sξ) He_k(ξ)] = s E[φ'(m + sξ) He_{k−1}(ξ)],

so that Cov(φ(x_i), φ(x_j)) = Σ_{k≥1} c_k(i) c_k(j) ρ_ij^k/k! for correlated entries. The
coefficients of ReLU have a closed form. Those of smooth activations are by Gauss–Hermite quadrature.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

TERMS = 3
"""Hermite terms of covariances; variances are exact."""
NODES = 24
"""Nodes of the quadrature for smooth activations."""
FARTHEST = 30.0
"""Standard deviations of the mean from zero beyond which a ReLU counts as on or off."""


class Moments(NamedTuple):
    """Moments of h = φ(x) for Gaussian x, each of the shape of x."""

    mean: Tensor
    variance: Tensor
    third: Tensor
    """E h³."""
    skew: Tensor
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


def activation_moments(activation: nn.Module | None, m: Tensor, s: Tensor, scale: Tensor | float):
    """The moments of φ(cx)/c for x of means m and standard deviations s > 0, and c the scale.

    Without an activation φ is the identity.
    """
    if activation is None:
        return _identity(m, s)
    if isinstance(activation, nn.ReLU):  # its scale has no effect
        return _relu(m, s)
    return _smooth(activation, m, s, scale)


def _identity(m: Tensor, s: Tensor) -> Moments:
    one, zero = torch.ones_like(m), torch.zeros_like(m)
    third = m**3 + 3 * m * s**2
    coefficients = (s, *[zero] * (TERMS - 1))
    return Moments(m, s**2, third, 2 * m * s**2, one, zero, 2 * m, coefficients)


def _relu(m: Tensor, s: Tensor) -> Moments:
    t = (m / s).clamp(-FARTHEST, FARTHEST)
    P, Q = torch.erfc(-t / math.sqrt(2)) / 2, torch.erfc(t / math.sqrt(2)) / 2
    p = torch.exp(-t.square() / 2) / math.sqrt(2 * math.pi)
    mean = m * P + s * p
    # Written so that nothing cancels where the unit is nearly always on, or nearly always off.
    variance = s**2 * (P + t**2 * P * Q + t * p * (Q - P) - p**2)
    third = (m**3 + 3 * m * s**2) * P + (m**2 + 2 * s**2) * s * p
    skew = s**3 * (t**3 * P * Q + t * P * (3 - P) + p * (t**2 * (Q - P) + 2 - P - t * p))
    hermite = (P, p, -t * p, (t**2 - 1) * p, -(t**3 - 3 * t) * p)
    return Moments(
        mean, variance, third, skew, P, p / s, 2 * mean, tuple(s * c for c in hermite[:TERMS])
    )


def _smooth(activation: nn.Module, m: Tensor, s: Tensor, scale: Tensor | float) -> Moments:
    nodes, weights, hermite = _hermite_rule(NODES)
    x = nodes.to(m)
    inputs = scale_last(scale) * (m.unsqueeze(-1) + s.unsqueeze(-1) * x)
    values, slopes = _with_slope(activation, inputs)
    values = values / scale_last(scale)

    def expect(f: Tensor) -> Tensor:
        return f @ weights.to(m)

    mean = expect(values)
    centred = values - mean.unsqueeze(-1)
    variance = expect(centred.square())
    second = variance + mean.square()
    skew = expect(centred * (values.square() - second.unsqueeze(-1)))
    moments = [expect(slopes * polynomial) for polynomial in hermite.to(m)]
    return Moments(
        mean,
        variance,
        expect(values**3),
        skew,
        moments[0],
        moments[1] / s,
        2 * expect(values * slopes),
        tuple(s * moment for moment in moments),
    )


def scale_last(scale: Tensor | float) -> Tensor | float:
    """A scale per member, with one more dimension for the nodes."""
    return scale.unsqueeze(-1) if isinstance(scale, Tensor) else scale


def _with_slope(activation: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """φ(x) and φ'(x)."""
    y = activation(x)
    if isinstance(activation, nn.Tanh):
        return y, 1 - y.square()
    assert isinstance(activation, nn.GELU)
    if activation.approximate == "none":
        density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
        return y, torch.erfc(-x / math.sqrt(2)) / 2 + x * density
    root = math.sqrt(2 / math.pi)
    inner = torch.tanh(root * (x + 0.044715 * x**3))
    return y, (1 + inner) / 2 + x * (1 - inner.square()) * root * (1 + 0.134145 * x**2) / 2


@cache
def _hermite_rule(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and weights of Gauss–Hermite quadrature, and He_0, …, He_{TERMS−1} at the nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    polynomials = np.polynomial.hermite_e.hermevander(nodes, TERMS - 1).T
    return (
        torch.tensor(nodes),
        torch.tensor(weights / weights.sum()),
        torch.tensor(polynomials),
    )
