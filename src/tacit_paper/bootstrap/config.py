"""Sizes and settings of the bootstrap figure."""

from dataclasses import dataclass
from typing import Literal

from tacit_paper import least_squares as ls

Kind = Literal["pairs", "residual"]
"""Whether a resample draws examples (x, y), or residuals that it adds to fitted values."""
KINDS: tuple[Kind, ...] = ("pairs", "residual")


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    seed: int = ls.SEED
    resampling_seed: int = 42
    noise: float = 10.0
    """σ of panels B to E."""
    step: float = 0.01
    """η of θ += (η/n) Xᵀ(y − Xθ)."""
    stop: int = 500
    """The step at which training stops."""
    pools: int = 10
    endpoints: tuple[int, ...] = tuple(range(1, 101))
    """Numbers m of stacked endpoints; the last is the size of a pool."""
    shown: tuple[int, int, int] = (1, 50, 100)
    """m of panels B, C and D."""
    sigmas: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0)
    noise_offset: int = 7919
    """Added to the seed of the data to seed the noise of panel F."""
    draws: int = 40
    """Further draws of inputs, coefficients and noise in panel F."""
    draw_pools: int = 3
    """Pools per further draw."""
    joined: tuple[int, ...] = (5, 20, 80, 160)
    """Numbers of pools that are joined to one, for the limit of many endpoints."""

    @property
    def size(self) -> int:
        """Number of endpoints in a pool, including the one on the data set itself."""
        return self.endpoints[-1]


PAPER = Config()
QUICK = Config(
    pools=2,
    endpoints=(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 20, 30, 40, 50, 70, 100),
    draws=12,
    draw_pools=1,
    joined=(5, 20),
)
