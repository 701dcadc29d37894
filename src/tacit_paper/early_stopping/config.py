"""Sizes and settings of the early-stopping figure."""

from dataclasses import dataclass

from tacit_paper import least_squares as ls


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    seed: int = ls.SEED
    step: float = 0.01
    """η of θ += (η/n) Xᵀ(y − Xθ)."""
    stop: int = 500
    """The step at which training stops in panels A to C."""
    identity: tuple[int, ...] = (1, 10, 100, 500, 1000)
    """Steps t at which the minimiser under Λ(t) is compared with the iterate."""
    pools: int = 10
    endpoints: tuple[int, ...] = (*range(1, 13), 15, 20, 30, 50, 70, 100)
    """Numbers m of stacked endpoints; the last is the size of a pool."""
    datasets: int = 200
    """Data sets of panel C."""
    datasets_per_unit: int = 50
    cap: int = 2000
    """The largest number of steps in panel D."""
    patience: int = 5
    min_delta: float = 1e-3
    """Minimum improvement of the mean squared error that the published panel D requires."""
    checkpoints: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 150, 200, 300, 500, 1000)
    adam_rate: float = 0.05
    adam_epochs: int = 30_000
    adam_patience: int = 2000


PAPER = Config()
QUICK = Config(
    pools=4,
    datasets=100,
    endpoints=(1, 2, 4, 6, 8, 9, 10, 11, 20, 50, 100),
    checkpoints=(1, 10, 100, 500, 1000),
)
