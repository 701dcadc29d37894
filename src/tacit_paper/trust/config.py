"""Sizes of the trust figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes and settings."""

    replicates: int = 300
    """Number of data sets, initial weights and runs of each problem."""
    first: int = 40_000
    """Seed of the first replicate; smaller seeds were used while problems were chosen."""


PAPER = Config()
QUICK = Config(replicates=1)
