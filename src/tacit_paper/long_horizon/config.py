"""Sizes and settings of the long-horizon figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    etas: tuple[float, ...] = (0.01, 0.03)
    """Step sizes on least squares."""
    steps: int = 50
    examples: int = 500
    inputs: int = 10
    noise: float = 0.1
    data: str = "mnist"
    """What the networks are trained on: mnist, or digits, which need no download."""
    normalisation: tuple[float, float] = (0.1307, 0.3081)
    """Mean and standard deviation of a pixel."""
    network_eta: float = 0.01
    network_steps: int = 30
    network_examples: int = 1000
    hidden: tuple[int, ...] = (64, 32)
    activations: tuple[str, ...] = ("tanh", "ReLU")
    substeps: int = 5
    """Runge–Kutta steps of a flow in the time of one step of descent."""
    seed: int = 0


PAPER = Config()
QUICK = Config(
    steps=30, data="digits", normalisation=(0.3053, 0.3761), network_steps=12,
    network_examples=500, hidden=(32, 16), substeps=3,
)  # fmt: skip
