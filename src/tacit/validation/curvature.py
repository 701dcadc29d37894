"""The smallest eigenvalue of a Hessian, dense or by Lanczos, and a test for quadratic functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.validation.penalised import NoHessianError, PenalisedObjective

DENSE_LIMIT = 500
"""Largest number of parameters for which the Hessian is formed as a dense matrix."""
ZERO_TOLERANCE = 5e3
"""Eigenvalues below this many machine epsilons times the largest (1e-12 in float64) are zero."""
LANCZOS_TOLERANCE = 1e-9
"""With Lanczos, eigenvalues below this fraction of the largest are also zero."""


@dataclass(frozen=True, eq=False)
class SmallestEigenvalue:
    """The smallest eigenvalue of a symmetric matrix, and the level below which it counts as zero.

    Args:
        value: the smallest eigenvalue.
        zero_level: eigenvalues of at most this magnitude are indistinguishable from zero.
        vectors: orthonormal eigenvectors, as columns, of the smallest eigenvalue and of those that
            are equal to it up to rounding (Lanczos computes only one).
        method: how it was computed.
    """

    value: float
    zero_level: float
    vectors: Tensor
    method: Literal["dense", "Lanczos"]


def smallest_eigenvalue(
    function: PenalisedObjective, theta: Tensor, generator: torch.Generator
) -> SmallestEigenvalue:
    """Smallest eigenvalue of ∇²f(θ): dense up to 500 parameters, by Lanczos beyond."""
    if len(theta) <= DENSE_LIMIT:
        return smallest_dense(function.hessian(theta), function.epsilon)
    return smallest_lanczos(function.hvp_at(theta), len(theta), function.epsilon, generator)


def smallest_dense(matrix: Tensor, epsilon: float) -> SmallestEigenvalue:
    """Smallest eigenvalue of a dense symmetric matrix, exact to rounding.

    Parameters of very different scale spread the eigenvalues of H without making it singular.
    Positive definiteness is therefore decided on D H D, with D diagonal so that the diagonal is
    one: it has the same signs of eigenvalues as H (Sylvester's law of inertia). If D H D is
    positive definite, the smallest eigenvalue is computed as 1/λ_max(H⁻¹), which is accurate
    relative to itself, where eigh is accurate only relative to the largest eigenvalue.
    """
    values, vectors = torch.linalg.eigh(matrix)
    scale = unit_scale(matrix.diagonal().abs())
    scaled = scale[:, None] * matrix * scale
    scaled_values = torch.linalg.eigvalsh(scaled)
    if float(scaled_values[0]) > ZERO_TOLERANCE * epsilon * float(scaled_values.abs().max()):
        inverse = scale[:, None] * torch.linalg.inv(scaled) * scale
        smallest = 1 / float(torch.linalg.eigvalsh(inverse)[-1])
        return SmallestEigenvalue(smallest, 0.0, vectors[:, :1], "dense")
    zero_level = ZERO_TOLERANCE * epsilon * float(values.abs().max())
    indistinguishable = values <= values[0] + 2 * zero_level
    return SmallestEigenvalue(float(values[0]), zero_level, vectors[:, indistinguishable], "dense")


def unit_scale(diagonal: Tensor) -> Tensor:
    """The diagonal of D such that D H D has a unit diagonal; one where H's diagonal is zero."""
    return torch.where(diagonal > 0, diagonal, 1.0).rsqrt()


def smallest_lanczos(
    product: Callable[[Tensor], Tensor], size: int, epsilon: float, generator: torch.Generator
) -> SmallestEigenvalue:
    """Smallest eigenvalue from Hessian-vector products only.

    The first run finds the largest magnitude m. The second finds the largest eigenvalue of
    1.01 m I − H, which is 1.01 m − λ_min(H).
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    start = torch.randn(size, generator=generator, dtype=torch.float64).numpy()

    def extreme_eigenpair(shift: float, sign: float, **options: Any):
        """The eigenpair of shift·I + sign·H that the options ask ARPACK for."""

        def apply(x):
            v = torch.from_numpy(x.reshape(-1).copy())
            return (shift * v + sign * product(v)).numpy()

        operator = LinearOperator((size, size), matvec=apply, dtype="float64")  # pyright: ignore
        return eigsh(operator, k=1, v0=start, ncv=min(size, 40), maxiter=200, **options)

    try:
        largest = float(abs(extreme_eigenpair(0.0, 1.0, which="LM", tol=1e-4)[0][0])) or 1.0
        # Shifted, so that the tolerance is relative to the largest and not to a μ near zero.
        shift, tolerance = 1.01 * largest, LANCZOS_TOLERANCE / 10
        shifted, vector = extreme_eigenpair(shift, -1.0, which="LA", tol=tolerance)
    except ArpackNoConvergence as error:
        raise NoHessianError(
            "Lanczos did not converge, because too many eigenvalues lie close together: treat "
            "uniqueness as not certified, or certify a smaller model."
        ) from error
    zero_level = largest * max(ZERO_TOLERANCE * epsilon, LANCZOS_TOLERANCE)
    value = shift - float(shifted[0])
    return SmallestEigenvalue(value, zero_level, torch.from_numpy(vector), "Lanczos")


def is_quadratic(function: PenalisedObjective, theta: Tensor, generator: torch.Generator) -> bool:
    """Whether ∇f(θ + δ) = ∇f(θ) + ∇²f(θ)·δ at every displacement δ that is tried.

    The displacements lead to the origin and its mirror image −θ, because lasso-like penalties
    change their gradient there, and far away in two random directions.
    """
    _, gradient = function.value_and_gradient(theta)
    product = function.hvp_at(theta)
    radius = 3 * max(float(theta.norm()), 1.0)
    noise = torch.randn(2, len(theta), generator=generator, dtype=torch.float64)
    directions = noise / noise.norm(dim=1, keepdim=True)
    far = [factor * radius * direction for factor in (1, 1e3, 1e6) for direction in directions]
    for displacement in (-theta, -2 * theta, *far):
        try:
            displaced = function.value_and_gradient(theta + displacement)[1]
        except InputError:  # f overflows there, which no quadratic would
            return False
        change = product(displacement)
        size = float(gradient.norm() + displaced.norm() + change.norm())
        if float((displaced - gradient - change).norm()) > function.epsilon**0.6 * size:
            return False
    return True
