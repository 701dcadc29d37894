"""Moments of activations of skewed variables, against dense quadrature."""

import math

import pytest
import torch
from torch import nn

from tacit.regularizers.dropout.activations import activation_moments, skewed_normal


@pytest.mark.parametrize("skewness", [-0.9, -0.16, 0.4, 1.5])
@pytest.mark.parametrize(
    "activation", [None, nn.ReLU(), nn.GELU(), nn.GELU("tanh"), nn.Tanh()], ids=str
)
def test_moments_are_those_of_dense_quadrature(activation, skewness):
    m = torch.tensor([-2.0, -0.3, 0.0, 0.8, 3.0], dtype=torch.float64, requires_grad=True)
    s = torch.tensor([0.5, 1.0, 0.2, 2.0, 0.7], dtype=torch.float64)
    x = skewed_normal(m, s, torch.full_like(s, skewness))
    moments = activation_moments(activation, x, 1.3, torch.float64)
    xi = torch.linspace(-12, 12, 40_001, dtype=torch.float64)[:, None]
    density = torch.exp(-(xi**2) / 2) / math.sqrt(2 * math.pi) * (xi[1] - xi[0])
    values = m + s * torch.expm1(x.t * xi - x.t**2 / 2) / x.y
    weighted = values - m
    expected_skewness = (density * weighted**3).sum(0) / s**3
    torch.testing.assert_close(
        expected_skewness, torch.full_like(s, skewness), rtol=1e-6, atol=4e-3
    )
    h = values if activation is None else activation(1.3 * values) / 1.3

    def mean(f):
        return (density * f).sum(0)

    hermite = (xi, xi**2 - 1, xi**3 - 3 * xi)
    mean_of_h = mean(h)
    (slope,) = torch.autograd.grad(mean_of_h.sum(), m, create_graph=True)
    (square_slope,) = torch.autograd.grad(mean(h**2).sum(), m, retain_graph=True)
    expected = {
        "mean": mean_of_h,
        "variance": mean(h**2) - mean_of_h**2,
        "third": mean(h**3),
        "covariance_with_square": mean(h**3) - mean_of_h * mean(h**2),
        "slope": slope,
        "square_slope": square_slope,
    }
    for name, value in expected.items():
        torch.testing.assert_close(
            getattr(moments, name), value, rtol=1e-3, atol=2e-4, msg=lambda t, n=name: f"{n}: {t}"
        )
    for coefficient, polynomial in zip(moments.coefficients, hermite, strict=True):
        torch.testing.assert_close(coefficient, mean(h * polynomial), rtol=1e-3, atol=2e-4)
    if activation is not None:  # E φ'' is the derivative of E φ' by the mean
        (bend,) = torch.autograd.grad(moments.slope.sum(), m)
        torch.testing.assert_close(moments.bend, bend, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.GELU(), nn.Tanh()], ids=str)
def test_without_skewness_they_are_those_of_a_gaussian(activation):
    m = torch.tensor([-2.0, -0.3, 0.0, 0.8, 3.0], dtype=torch.float64)
    s = torch.tensor([0.5, 1.0, 0.2, 2.0, 0.7], dtype=torch.float64)
    moments = activation_moments(
        activation, skewed_normal(m, s, torch.zeros_like(s)), 1.0, torch.float64
    )
    xi = torch.linspace(-12, 12, 40_001, dtype=torch.float64)[:, None]
    density = torch.exp(-(xi**2) / 2) / math.sqrt(2 * math.pi) * (xi[1] - xi[0])
    h = m + s * xi if activation is None else activation(m + s * xi)
    mean = (density * h).sum(0)
    variance = (density * (h - mean) ** 2).sum(0)
    torch.testing.assert_close(moments.mean, mean, rtol=1e-3, atol=5e-4)
    torch.testing.assert_close(moments.variance, variance, rtol=3e-3, atol=1e-3)
    torch.testing.assert_close(
        moments.coefficients[0], (density * h * xi).sum(0), rtol=3e-3, atol=1e-3
    )
