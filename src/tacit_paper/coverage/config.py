"""Sizes and settings of the coverage figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes and settings."""

    replicates: int = 600
    first: int = 5000
    """Seed of the first replicate; smaller seeds were used while the method was chosen."""
    examples: int = 1500
    part: int = 400
    """How many of `examples` a replicate of sampling sees."""
    draws: int = 16
    many: int = 4096
    """Draws whose mean is the true value for noise on the inputs."""
    steps: int = 60
    step_replicates: int = 500
    layers: int = 12


PAPER = Config()
QUICK = Config(replicates=16, examples=600, part=150, many=256, steps=40, step_replicates=8)
