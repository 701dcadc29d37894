"""Sizes and settings of the step-size figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    data: str = "mnist"
    """mnist, or digits, which need no download."""
    normalisation: tuple[float, float] = (0.1307, 0.3081)
    """Mean and standard deviation of a pixel."""
    train: int = 10_000
    validation: int = 1_000
    test: int = 5_000
    widths: tuple[int, ...] = (50, 100, 200, 400, 800, 1600)
    hidden: int = 5
    """Number of hidden layers."""
    etas: tuple[float, ...] = (5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1, 5e-1)
    epochs: int = 50
    batch_size: int = 128
    seed: int = 0
    """Seed of the initial weights and of the batch orders, the same for all step sizes."""
    enough: float = 0.9
    """Training accuracy that a checkpoint needs."""
    probe: int = 2048
    """Training examples on which the steps and the flow are computed."""
    steps: int = 5
    substeps: int = 10
    """Runge–Kutta steps of the flow in the time of one step of descent."""
    plain_etas: tuple[float, ...] = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
    """Step sizes on least squares."""


PAPER = Config()
QUICK = Config(
    data="digits", normalisation=(0.3053, 0.3761), train=1200, validation=200, test=397,
    widths=(32, 64), etas=(1e-3, 1e-2, 5e-2, 1e-1), epochs=25, batch_size=16, probe=512,
)  # fmt: skip
