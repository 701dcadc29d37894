"""The space that products with a symmetric matrix reach from a few vectors."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Krylov:
    """An orthonormal basis that grows by products with H, and what H is in it.

    Vectors are multiplied in their order, each for one more vector, so that several starting
    vectors make a block method, and what adds nothing is simply left out.
    """

    product: Callable[[Tensor], Tensor]
    epsilon: float
    vectors: list[Tensor] = field(default_factory=list)
    first: list[Tensor] = field(default_factory=list)
    """Coefficients of the starting vectors."""
    images: list[Tensor] = field(default_factory=list)
    """Coefficients of H·vector, for the vectors that were multiplied."""

    @property
    def whole(self) -> bool:
        """Whether H leads nowhere else."""
        return len(self.images) == len(self.vectors)

    def start(self, vector: Tensor) -> None:
        """Add a starting vector."""
        self.first.append(self._added(vector))

    def grow(self) -> None:
        """Multiply one more vector."""
        self.images.append(self._added(self.product(self.vectors[len(self.images)])))

    def curvature(self, size: int) -> Tensor:
        """H over the first vectors, all of which were multiplied."""
        found = _padded(self.images[:size], size)
        return (found + found.T) / 2

    def starts(self, size: int) -> Tensor:
        """The starting vectors over the first vectors."""
        return _padded(self.first, size)

    def _added(self, vector: Tensor) -> Tensor:
        """Coefficients of a vector, with one more basis vector where it needs one."""
        length, found = float(vector.norm()), torch.zeros(len(self.vectors), dtype=torch.float64)
        for _ in range(2):  # once leaves rounding errors that grow with the space
            for i, held in enumerate(self.vectors):
                part = float(held @ vector)
                found[i] += part
                vector = vector - part * held
        left = vector.norm()
        if float(left) <= 100 * self.epsilon * length:
            return found
        self.vectors.append(vector / left)
        return torch.cat([found, left[None]])


def _padded(coefficients: list[Tensor], size: int) -> Tensor:
    """Coefficients as columns, over the first vectors."""
    found = torch.zeros(size, len(coefficients), dtype=torch.float64)
    for column, own in enumerate(coefficients):
        found[: len(own), column] = own[:size]
    return found
