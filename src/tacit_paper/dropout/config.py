"""Sizes and settings of the dropout figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    data: str = "mnist"
    """mnist, or digits, which need no download."""
    depths: tuple[int, ...] = (3, 5)
    """Numbers of hidden layers."""
    widths: tuple[int, ...] = (128, 256, 512)
    rates: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
    seeds: tuple[int, ...] = (123, 42, 666, 314, 17, 111, 325, 643, 432, 51)
    train: int = 54_000
    """Number of training examples; the rest of the training files is for validation."""
    step: float = 0.05
    momentum: float = 0.9
    milestones: tuple[int, ...] = (60, 100, 200)
    epochs: int = 500
    batch_size: int = 2048
    patience: int = 50
    best_seeds: int = 6
    """Number of seeds whose marginal effect is estimated at the best validation loss."""
    last_seeds: int = 3
    """Number of seeds whose marginal effect is estimated at the last weights, which takes many
    more masks."""
    noise: float = 0.05
    """Largest part of the marginal target's squared norm that may be noise of the masks."""
    fit_rate: float = 0.05
    fit_epochs: int = 2000
    fit_patience: int = 100
    fit_plateau: int = 10
    shuffles: int = 3
    """Shuffles of the data from which the published fit draws its minibatches."""


PAPER = Config()
QUICK = Config(
    data="digits",
    depths=(3,),
    widths=(32, 64),
    rates=(0.0, 0.05, 0.1, 0.3, 0.5),
    seeds=(123,),
    train=1400,
    milestones=(30, 40),
    epochs=50,
    batch_size=128,
    best_seeds=1,
    last_seeds=1,
    noise=0.1,
    fit_epochs=300,
    shuffles=1,
)
