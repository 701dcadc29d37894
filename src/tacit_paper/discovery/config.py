"""Sizes of the discovery figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes and settings."""

    replicates: int = 12
    """Data sets and initial weights of each panel, whose equations are stacked."""
    first: int = 70_000
    """Seed of the first replicate; smaller seeds were used while panels were chosen."""
    knots: int = 32


PAPER = Config()
QUICK = Config(replicates=3, knots=24)
