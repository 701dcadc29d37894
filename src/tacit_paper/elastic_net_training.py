"""How the networks of `elastic_net` are trained: data, start, penalties, batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import SGD, Adam, Data, Ensemble, Plan, Run, Stopping
from tacit.regularizers import Regularizer

Cell = tuple[float, float]


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
    """Examples of `examples` that are trained on."""
    rate: float = 1e-3
    epochs: int = 200
    batch_size: int = 32
    patience: int = 15
    kept: int = 5
    """Last epochs that the drift-corrected estimate and its interval come from."""
    fit_rate: float = 1e-2
    fit_epochs: int = 1000
    fit_patience: int = 50
    shuffles: int = 4
    """Shuffles of minibatches that the published fit goes through in turn."""
    polished: tuple[Cell, ...] = ((0.01, 0.1), (0.01, 1), (0.1, 0.1), (0.1, 1), (1, 0.1), (1, 1))
    polished_per_unit: int = 5
    """Data sets polished in one unit."""
    retrained: tuple[tuple[float, float, int], ...] = (
        (0.1, 0.1, 0), (0.1, 0.1, 1), (0.1, 0.1, 2), (0.001, 1, 0), (0.001, 1, 1), (0.1, 1, 1),
        (0.1, 1, 2),
    )  # fmt: skip


@dataclass(frozen=True)
class Member:
    """One network of the sweep: its penalties and its data set."""

    l1: float
    l2: float
    seed: int


@dataclass(frozen=True, eq=False)
class Sweep:
    """Networks that are trained together."""

    config: Config
    members: Sequence[Member]
    device: str

    @property
    def data(self) -> Data:
        """Training data of every member."""
        sets = sorted({m.seed for m in self.members})
        drawn = [draw(self.config, seed) for seed in sets]
        return Data(
            torch.stack([X for X, _ in drawn]).to(self.device),
            torch.stack([y for _, y in drawn]).to(self.device),
            [sets.index(m.seed) for m in self.members],
        )

    @property
    def start(self) -> Ensemble:
        """The members as initialised, alike for all penalties of a data set."""
        size, width = self.config.inputs, self.config.width
        made = ensembles.initialise(
            lambda: nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, 1)),
            [1000 + m.seed for m in self.members],
        )
        return made.to(self.device)

    def train(
        self,
        regularizers: Sequence[Regularizer],
        *,
        optimizer: str = "sgd",
        epochs: Sequence[int] | None = None,
    ) -> Run:
        """Train all on loss + λ₁ smooth_l1 + λ₂ l2; given epochs are not cut short."""
        config = self.config
        plan = Plan(
            SGD(config.rate) if optimizer == "sgd" else Adam(config.rate),
            config.epochs if epochs is None else epochs,
            config.batch_size,
            Stopping(config.patience) if epochs is None else None,
            averaged=regularizers[:1],
            kept=config.kept,
        )
        strengths = ([m.l1 for m in self.members], [m.l2 for m in self.members])
        return ensembles.train(
            self.start, F.mse_loss, self.data, plan,
            seeds=[2000 + m.seed for m in self.members],
            penalties=dict(zip(regularizers, strengths, strict=True)),
        )  # fmt: skip


def draw(config: Config, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A data set: inputs, coefficients 5·N(0, 1), noise 0.5, and a random part to train on."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(config.examples, config.inputs, generator=generator)
    coefficients = 5 * torch.randn(config.inputs, generator=generator)
    y = X @ coefficients + 0.5 * torch.randn(config.examples, generator=generator)
    chosen = torch.randperm(config.examples, generator=generator)[: config.train]
    return X[chosen], y[chosen, None]
