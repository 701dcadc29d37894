"""Sizes and settings of the figure of dropout by moments."""

from dataclasses import dataclass, field, replace

from tacit_paper import dropout


@dataclass(frozen=True)
class Networks:
    """Networks of one shape, at some rates, with the first seeds of the training's settings."""

    depth: int
    width: int
    rates: tuple[float, ...]
    seeds: int


@dataclass(frozen=True)
class EveryLayer:
    """Networks with dropout after every hidden layer, trained by Adam on normalised pixels."""

    networks: tuple[Networks, ...] = (
        Networks(3, 256, (0.1, 0.3, 0.5), seeds=5),
        Networks(3, 512, (0.5,), seeds=5),
        Networks(5, 128, (0.1, 0.3), seeds=5),
        Networks(5, 256, (0.5,), seeds=5),
    )
    step: float = 1e-3
    epochs: int = 25
    batch_size: int = 256


@dataclass(frozen=True)
class Retraining:
    """Networks that are trained again with a penalty in place of dropout."""

    networks: Networks = field(default_factory=lambda: Networks(3, 128, (0.1, 0.3, 0.5), seeds=10))
    train: int = 6000
    """Number of training images: the gradient of the penalty costs hundreds of plain ones."""
    batch_size: int = 256
    penalty_examples: int = 8
    """Examples of each minibatch on which a penalty in place of dropout is computed."""


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are those of the stored rows."""

    training: dropout.Config = dropout.PAPER
    """How the paper's networks are trained: data, optimizer, schedule, patience and seeds."""
    networks: tuple[Networks, ...] = (
        Networks(3, 128, (0.1, 0.3, 0.5), seeds=2),
        Networks(3, 256, (0.1, 0.3, 0.5), seeds=5),
        Networks(5, 128, (0.1, 0.3, 0.5), seeds=2),
        Networks(5, 256, (0.5,), seeds=1),
    )
    """The paper's networks, with dropout after every hidden layer but the last."""
    every_layer: EveryLayer = field(default_factory=EveryLayer)
    examples: int = 6000
    """Number of training images over which what dropout adds is measured: the first ones."""
    cost_examples: int = 500
    """Number of images on which the costs of columns are measured."""
    one_layer: Networks = field(default_factory=lambda: Networks(1, 128, (0.0, 0.5), seeds=3))
    """Networks with one hidden layer, where no dropout layer acts."""
    retraining: Retraining = field(default_factory=Retraining)


PAPER = Config()
QUICK = Config(
    training=replace(dropout.QUICK, epochs=30),
    networks=(Networks(3, 32, (0.1, 0.5), seeds=1),),
    every_layer=EveryLayer(networks=(Networks(3, 32, (0.3,), seeds=1),), epochs=10),
    examples=1400,
    cost_examples=200,
    one_layer=Networks(1, 32, (0.0, 0.5), seeds=1),
    retraining=Retraining(Networks(3, 32, (0.1,), seeds=1), train=1400, batch_size=128),
)
