"""Sizes and settings of the averaging figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes and settings of least squares, and of the networks on scikit-learn's digits."""

    directions: int = 12
    """Weights of the least-squares problem: one per direction of curvature."""
    curvatures: tuple[float, float] = (1e-3, 1.0)
    """Smallest and largest curvature h; the others lie between them, evenly in log h."""
    step: float = 0.05
    """η on least squares."""
    steps: tuple[int, ...] = (10, 100, 1000, 10_000)
    """Numbers t of iterates on least squares."""
    seeds: int = 10
    width: int = 32
    train: int = 1000
    batch_size: int = 32
    network_step: float = 0.05
    """η of SGD in the networks, constant."""
    warm_up: int = 10
    """Epochs before averaging starts."""
    epochs: tuple[int, ...] = (2, 5, 10, 20, 40)
    """Numbers of epochs whose iterates are averaged."""
    retrained: int = 10
    """The number of epochs after which networks are trained again with penalties."""
    iterations: int = 300
    """At most, of L-BFGS in that training."""


PAPER = Config()
QUICK = Config(
    steps=(10, 1000), seeds=2, width=24, train=500, warm_up=10, epochs=(2, 5, 10), iterations=120
)
