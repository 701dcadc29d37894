"""Sizes and settings of the dropout figure."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EveryLayer:
    """Networks with dropout after every hidden layer, trained by Adam on normalised pixels."""

    networks: tuple[tuple[int, int, tuple[float, ...]], ...] = (
        (3, 256, (0.1, 0.3, 0.5)),
        (3, 512, (0.5,)),
        (5, 128, (0.1, 0.3)),
        (5, 256, (0.5,)),
    )
    """Depth, width and dropout rates; each architecture is one unit of work."""
    seeds: int = 5
    """Number of seeds, the first of the figure's."""
    step: float = 1e-3
    epochs: int = 25
    batch_size: int = 256


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
    last_seeds: int = 2
    """Number of seeds whose marginal effect is estimated at the last weights, which takes many
    more masks."""
    noise: float = 0.05
    """Largest part of the marginal target's squared norm that may be noise of the masks."""
    moments_rates: tuple[float, ...] = (0.1, 0.3, 0.5)
    """Rates at which dropout by moments is one of the candidates, at the best weights."""
    moments_seeds: int = 5
    """Number of seeds of these networks; the cost grows with the square of the width."""
    wide: int = 512
    """Width from which there are `wide_moments_seeds`."""
    wide_moments_seeds: int = 1
    cost_examples: int = 4096
    """Number of examples on which the costs of columns are measured."""
    fit_rate: float = 0.05
    fit_epochs: int = 2000
    fit_patience: int = 100
    fit_plateau: int = 10
    shuffles: int = 3
    """Shuffles of the data from which the published fit draws its minibatches."""
    one_layer: tuple[int, int] = (128, 3)
    """Width and number of seeds of the networks with one hidden layer."""
    every_layer: EveryLayer = field(default_factory=EveryLayer)
    retrained: tuple[int, int] = (3, 256)
    """Depth and width of the networks that are trained again without dropout."""
    retrained_rates: tuple[float, ...] = (0.1, 0.3, 0.5)
    """Dropout rates of the networks that are trained again without dropout."""
    retrained_seeds: int = 10
    """Number of seeds of the networks that are trained again without dropout."""
    penalty_examples: int = 64
    """Examples of each minibatch on which a penalty in place of dropout is computed."""


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
    moments_rates=(0.1, 0.5),
    moments_seeds=1,
    wide=64,
    wide_moments_seeds=0,
    cost_examples=200,
    fit_epochs=300,
    shuffles=1,
    one_layer=(32, 1),
    every_layer=EveryLayer(networks=((3, 32, (0.3,)),), seeds=1, epochs=10),
    retrained=(3, 32),
    retrained_rates=(0.1,),
    retrained_seeds=1,
    penalty_examples=8,
)
