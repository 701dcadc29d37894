"""Sizes and settings of the training-coverage figure."""

from dataclasses import dataclass

from tacit_paper.elastic_net.config import Cell

VALUES = (1e-3, 1e-2, 0.1, 1.0)
"""Strengths that the cells combine."""


@dataclass(frozen=True)
class Config:
    """Sizes and settings."""

    networks: int = 300
    """Number of data sets, which is also the number of networks of each cell."""
    networks_per_unit: int = 10
    first: int = 20_000
    """Seed of the first data set; smaller seeds were used while the method was chosen."""
    epochs: int = 200
    kept: int = 5
    """Number of last epochs that the estimate and its interval use."""
    cells: tuple[Cell, ...] = tuple(
        (l1, l2) for l1 in VALUES for l2 in VALUES if max(l1, l2) >= 0.1
    )  # fmt: skip
    """Pairs of true strengths (λ₁, λ₂)."""


PAPER = Config()
QUICK = Config(networks=3, epochs=30, cells=((0.1, 1.0), (1.0, 0.1), (1.0, 1.0)))
