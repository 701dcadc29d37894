"""Sizes of the bench of laws."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes and settings."""

    first: int = 100
    """The first seed of data and weights; smaller ones were used while laws were written."""
    seeds: int = 5
    """Number of seeds."""
    more_draws: int = 16
    """How many times the draws of a law are taken."""


PAPER = Config()
QUICK = Config(seeds=1, more_draws=1)
