"""The Krylov space of a symmetric matrix: the span of a few vectors and their products with it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class KrylovSpace:
    """An orthonormal basis that grows by products with a symmetric matrix H.

    Basis vectors are multiplied by H in their order, and each product adds at most one vector, so
    several starting vectors make a block method. A product that lies in the space adds none.
    """

    product: Callable[[Tensor], Tensor]
    """From v to H·v."""
    epsilon: float
    """Relative precision of the products."""
    basis: list[Tensor] = field(default_factory=list)
    start_coefficients: list[Tensor] = field(default_factory=list)
    """The starting vectors in the basis."""
    product_coefficients: list[Tensor] = field(default_factory=list)
    """H·v in the basis, for the basis vectors v that were multiplied."""

    @property
    def size(self) -> int:
        """Number of basis vectors that were multiplied by H."""
        return len(self.product_coefficients)

    @property
    def invariant(self) -> bool:
        """Whether H maps the space into itself, so that it cannot grow any further."""
        return self.size == len(self.basis)

    def add_start(self, vector: Tensor) -> None:
        """Add a starting vector."""
        self.start_coefficients.append(self._coefficients(vector))

    def extend(self) -> None:
        """Multiply one more basis vector by H."""
        self.product_coefficients.append(self._coefficients(self.product(self.basis[self.size])))

    def projected_matrix(self, size: int) -> Tensor:
        """QᵀHQ for the first `size` basis vectors Q, all of which were multiplied."""
        matrix = _as_columns(self.product_coefficients[:size], size)
        return (matrix + matrix.T) / 2

    def projected_starts(self, size: int) -> Tensor:
        """The starting vectors in the first `size` basis vectors, one per column."""
        return _as_columns(self.start_coefficients, size)

    def _coefficients(self, vector: Tensor) -> Tensor:
        """Coefficients of a vector in the basis, which is extended where it is not sufficient."""
        norm = float(vector.norm())
        coefficients = torch.zeros(len(self.basis), dtype=torch.float64)
        for _ in range(2):  # orthogonalising once leaves rounding errors that grow with the space
            for i, basis_vector in enumerate(self.basis):
                coefficient = float(basis_vector @ vector)
                coefficients[i] += coefficient
                vector = vector - coefficient * basis_vector
        remainder = vector.norm()
        if float(remainder) <= 100 * self.epsilon * norm:
            return coefficients
        self.basis.append(vector / remainder)
        return torch.cat([coefficients, remainder[None]])


def _as_columns(coefficients: list[Tensor], size: int) -> Tensor:
    """Coefficients as the columns of a matrix with `size` rows, cut off or padded with zeros."""
    matrix = torch.zeros(size, len(coefficients), dtype=torch.float64)
    for column, values in enumerate(coefficients):
        matrix[: len(values), column] = values[:size]
    return matrix
