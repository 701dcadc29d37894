"""Training of the elastic-net networks: data, initial weights, penalties, batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import SGD, Adam, Data, Ensemble, Plan, Run, Stopping
from tacit.objective.objective import Objective
from tacit.regularizers import Regularizer
from tacit_paper.elastic_net.config import Config


@dataclass(frozen=True)
class Member:
    """One network of the sweep: the strengths of its penalties and the seed of its data set."""

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
        seeds = sorted({member.seed for member in self.members})
        data_sets = [draw_data_set(self.config, seed) for seed in seeds]
        return Data(
            torch.stack([X for X, _ in data_sets]).to(self.device),
            torch.stack([y for _, y in data_sets]).to(self.device),
            [seeds.index(member.seed) for member in self.members],
        )

    @property
    def initial(self) -> Ensemble:
        """The members before training; all members of one data set have the same weights."""
        size, width = self.config.inputs, self.config.width
        ensemble = ensembles.initialise(
            lambda: nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, 1)),
            [1000 + member.seed for member in self.members],
        )
        return ensemble.to(self.device)

    def train(
        self,
        regularizers: Sequence[Regularizer],
        *,
        optimizer: str = "sgd",
        epochs: Sequence[int] | None = None,
    ) -> Run:
        """Train all members on loss + λ₁ smooth_l1 + λ₂ l2.

        Args:
            regularizers: smooth_l1 and l2, in this order.
            optimizer: `sgd` or `adam`.
            epochs: epochs of each member, without early stopping. By default training stops early,
                after at most `config.epochs`.
        """
        config = self.config
        plan = Plan(
            SGD(config.rate) if optimizer == "sgd" else Adam(config.rate),
            config.epochs if epochs is None else epochs,
            config.batch_size,
            Stopping(config.patience) if epochs is None else None,
            averaged=regularizers[:1],
            recorded_epochs=config.kept,
        )
        strengths = ([member.l1 for member in self.members], [member.l2 for member in self.members])
        return ensembles.train(
            self.initial, F.mse_loss, self.data, plan,
            seeds=[2000 + member.seed for member in self.members],
            penalties=dict(zip(regularizers, strengths, strict=True)),
        )  # fmt: skip

    def objective(self, ensemble: Ensemble, index: int) -> Objective:
        """The loss of one trained member over its training data, in float64."""
        X, y = draw_data_set(self.config, self.members[index].seed)
        model = ensemble.module(index).double()
        device = next(model.parameters()).device
        return Objective(model, F.mse_loss, (X.double().to(device), y.double().to(device)))


def draw_data_set(config: Config, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Training inputs and targets of one data set.

    y = Xc + ε with coefficients c ~ 5·N(0, 1) and noise ε ~ 0.5·N(0, 1); a random part of the
    examples is the training set.
    """
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(config.examples, config.inputs, generator=generator)
    coefficients = 5 * torch.randn(config.inputs, generator=generator)
    y = X @ coefficients + 0.5 * torch.randn(config.examples, generator=generator)
    chosen = torch.randperm(config.examples, generator=generator)[: config.train]
    return X[chosen], y[chosen, None]
