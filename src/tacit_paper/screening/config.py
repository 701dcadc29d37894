"""Sizes of the screening figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes and settings."""

    first: int = 80_000
    """Seed of the first network; smaller seeds were used while the screen was made."""
    seeds: int = 20
    """Networks without a penalty, of each kind."""
    repeats: int = 3
    """Networks of each kind with a penalty, on successive seeds."""
    iterations: int = 1500
    """Of L-BFGS, at most, in each of three rounds."""
    proximal_steps: int = 40_000
    """Steps of proximal descent, at most."""
    simulations: int = 2000
    """Simulated equations with correlated candidates."""
    examples: int = 50_000
    """Of the network on which the cost is measured."""


PAPER = Config()
QUICK = Config(
    seeds=2, repeats=1, iterations=150, proximal_steps=4_000, simulations=50, examples=20_000
)
