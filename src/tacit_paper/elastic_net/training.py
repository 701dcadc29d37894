"""Training of the elastic-net networks: data, initial weights, penalties, batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.nn import functional as F

from tacit import Fit, Objective, Regularizer, ensembles, l1, l2, smooth_l1
from tacit.ensembles import SGD, Adam, Data, Ensemble, Plan, Run, Stopping
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
    smooth: bool = True
    """Whether the penalty of strength λ₁ is the smoothed one, as in the paper's figure."""

    @cached_property
    def regularizers(self) -> list[Regularizer]:
        """The penalties of training: `smooth_l1` or `l1` with strength λ₁, `l2` with λ₂."""
        return [smooth_l1(self.config.beta) if self.smooth else l1(), l2()]

    @cached_property
    def data(self) -> Data:
        """Training data of every member."""
        seeds = sorted({member.seed for member in self.members})
        data_sets = [draw_data_set(self.config, seed) for seed in seeds]
        X, y = (torch.stack(parts).to(self.device) for parts in zip(*data_sets, strict=True))
        return Data(X, y, [seeds.index(member.seed) for member in self.members])

    def train(self, optimizer: str = "sgd", epochs: Sequence[int] | None = None) -> Run:
        """Train all members on loss + penalties; those of one data set start at the same weights.

        Args:
            optimizer: `sgd` or `adam`.
            epochs: epochs of each member, without early stopping. By default training stops early,
                after at most `config.epochs`.
        """
        config, members = self.config, self.members
        initial = ensembles.initialise(
            lambda: nn.Sequential(
                nn.Linear(config.inputs, config.width), nn.ReLU(), nn.Linear(config.width, 1)
            ),
            [1000 + member.seed for member in members],
        )
        plan = Plan(
            SGD(config.rate) if optimizer == "sgd" else Adam(config.rate),
            config.epochs if epochs is None else epochs,
            config.batch_size,
            Stopping(config.patience) if epochs is None else None,
            averaged=self.regularizers[:1],
            recorded_epochs=config.kept,
        )
        strengths = ([member.l1 for member in members], [member.l2 for member in members])
        return ensembles.train(
            initial.to(self.device), F.mse_loss, self.data, plan,
            seeds=[2000 + member.seed for member in members],
            penalties=dict(zip(self.regularizers, strengths, strict=True)),
        )  # fmt: skip

    def fits(self, run: Run) -> tuple[list[Fit], list[Fit]]:
        """Exact fits of all members: at the last weights, and from the last epochs' means."""
        last = ensembles.endpoint_equations(run.last, F.mse_loss, self.data, self.regularizers)
        drift = ensembles.epoch_equations(run, F.mse_loss, self.data, self.regularizers)
        return ensembles.fits(last), ensembles.fits(drift)

    def objective(self, ensemble: Ensemble, index: int) -> Objective:
        """The loss of one trained member over its training data, in float64."""
        X, y = draw_data_set(self.config, self.members[index].seed)
        data = (X.double().to(self.device), y.double().to(self.device))
        return Objective(ensemble.module(index).double(), F.mse_loss, data)


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
