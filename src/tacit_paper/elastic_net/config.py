"""Sizes and settings of the elastic-net figure."""

from dataclasses import dataclass

Cell = tuple[float, float]
"""One pair of true strengths (λ₁, λ₂)."""


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    strengths: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    """Values of λ₁ and of λ₂."""
    seeds: int = 10
    optimizers: tuple[str, ...] = ("sgd", "adam")
    beta: float = 1e-3
    """Smoothing width of the L1 penalty."""
    inputs: int = 10
    width: int = 200
    examples: int = 5000
    train: int = 4000
    """How many of `examples` are trained on."""
    rate: float = 1e-3
    epochs: int = 200
    batch_size: int = 32
    patience: int = 15
    kept: int = 5
    """Number of last epochs that the drift-corrected estimate and its interval use."""
    fit_rate: float = 1e-2
    fit_epochs: int = 1000
    fit_patience: int = 50
    shuffles: int = 4
    """Shuffles of the data from which the published fit draws its minibatches."""
    polished: tuple[Cell, ...] = ((0.01, 0.1), (0.01, 1), (0.1, 0.1), (0.1, 1), (1, 0.1), (1, 1))
    polished_per_unit: int = 5
    """Data sets polished in one unit."""
    retrained: tuple[tuple[float, float, int], ...] = (
        (0.1, 0.1, 0), (0.1, 0.1, 1), (0.1, 0.1, 2), (0.001, 1, 0), (0.001, 1, 1), (0.1, 1, 1),
        (0.1, 1, 2),
    )  # fmt: skip
    """Networks that are trained again, as (λ₁, λ₂, seed)."""
    nonsmooth: tuple[Cell, ...] = ((0.01, 0.1), (0.01, 1), (0.1, 0.1), (0.1, 1), (1, 0.1), (1, 1))
    """Cells that are also trained with |θ| itself in place of the smoothed penalty."""


PAPER = Config()
QUICK = Config(
    strengths=(1e-1, 1.0, 10.0), seeds=1, optimizers=("sgd",), epochs=30, shuffles=1,
    polished=((1, 1),), retrained=((1, 1, 1),), nonsmooth=((1, 1),),
)  # fmt: skip
