"""The ends of a Hessian's spectrum, dense or by Lanczos, and a probe for quadratics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.validation.penalised import NoHessianError, Penalised

DENSE = 500
"""Parameters up to which the Hessian is held whole."""
ZERO = 5e3
"""Eigenvalues within this many epsilons of the largest count as zero (1e-12 in float64) …"""
SETTLED = 1e-9
"""… or, by Lanczos, within this part of the largest."""

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The smallest eigenvalue of a symmetric matrix, and what counts as zero beside its largest."""

    smallest: float
    zero: float
    vectors: Tensor
    """Of the smallest eigenvalue, and of all that cannot be told from it."""
    method: Literal["dense", "Lanczos"]


def spectrum(function: Penalised, theta: Tensor, generator: torch.Generator) -> Spectrum:
    """Smallest eigenvalue of ∇²f(θ): by eigh up to 500 parameters, else by Lanczos on products."""
    if len(theta) <= DENSE:
        return dense_spectrum(function.hessian(theta), function.epsilon)
    product = function.curvature(theta)
    return lanczos_spectrum(product, len(theta), function.epsilon, generator)


def dense_spectrum(matrix: Tensor, epsilon: float) -> Spectrum:
    """All eigenvalues are computed; exact to rounding.

    Parameters of unequal scale spread a spectrum without making it singular: whether it is
    positive definite is asked of the matrix with a unit diagonal, which has the same signs.
    """
    values, vectors = torch.linalg.eigh(matrix)
    scale = unit_scale(matrix.diagonal().abs())
    even = torch.linalg.eigvalsh(scale[:, None] * matrix * scale)
    if float(even[0]) > ZERO * epsilon * float(even.abs().max()):
        inverse = scale[:, None] * torch.linalg.inv(scale[:, None] * matrix * scale) * scale
        smallest = 1 / float(torch.linalg.eigvalsh(inverse)[-1])
        return Spectrum(smallest, 0.0, vectors[:, :1], "dense")
    zero = ZERO * epsilon * float(values.abs().max())
    return Spectrum(float(values[0]), zero, vectors[:, values <= values[0] + 2 * zero], "dense")


def unit_scale(diagonal: Tensor) -> Tensor:
    """Factors that bring a diagonal to one; one where it is zero."""
    return torch.where(diagonal > 0, diagonal, 1.0).rsqrt()


def lanczos_spectrum(
    product: Product, size: int, epsilon: float, generator: torch.Generator
) -> Spectrum:
    """From products alone, first the largest in magnitude, then the smallest beside it."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    start = torch.randn(size, generator=generator, dtype=torch.float64).numpy()

    def extreme(shift: float, sign: float, which: str, tolerance: float):
        def apply(x):
            v = torch.from_numpy(x.reshape(-1).copy())
            return (shift * v + sign * product(v)).numpy()

        operator = LinearOperator((size, size), matvec=apply, dtype="float64")  # pyright: ignore
        return eigsh(
            operator,
            k=1,
            which=which,
            v0=start,
            tol=tolerance,  # pyright: ignore # the stubs say int
            ncv=min(size, 40),
            maxiter=200,
        )

    try:
        largest = float(abs(extreme(0.0, 1.0, "LM", 1e-4)[0][0])) or 1.0
        # Shifted, so that the tolerance is relative to the largest and not to a μ near zero.
        top, vector = extreme(1.01 * largest, -1.0, "LA", SETTLED / 10)
    except ArpackNoConvergence as error:
        raise NoHessianError(
            "Lanczos did not settle the smallest eigenvalue: too many lie close together. Take "
            "uniqueness as not certified, or certify a smaller model."
        ) from error
    zero = largest * max(ZERO * epsilon, SETTLED)
    return Spectrum(1.01 * largest - float(top[0]), zero, torch.from_numpy(vector), "Lanczos")


def is_quadratic(function: Penalised, theta: Tensor, generator: torch.Generator) -> bool:
    """Whether ∇f(θ + δ) = ∇f(θ) + ∇²f(θ)·δ, tried through the origin and far to two sides.

    Through the origin, because that is where lasso-like penalties bend.
    """
    _, slope = function.value_and_gradient(theta)
    product = function.curvature(theta)
    far = 3 * max(float(theta.norm()), 1.0)
    noise = torch.randn(2, len(theta), generator=generator, dtype=torch.float64)
    sides = noise / noise.norm(dim=1, keepdim=True)
    probes = [reach * far * side for reach in (1, 1e3, 1e6) for side in sides]
    for move in (-theta, -2 * theta, *probes):
        try:
            there = function.value_and_gradient(theta + move)[1]
        except InputError:  # it overflows there, as no quadratic would
            return False
        expected = product(move)
        size = float(slope.norm() + there.norm() + expected.norm())
        if float((there - slope - expected).norm()) > function.epsilon**0.6 * size:
            return False
    return True
