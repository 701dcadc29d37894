"""SGD and Adam on rows of parameters, as torch's optimizers with a rate for each member."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.ensembles.checks import numbers
from tacit.errors import InputError

Rate = float | Sequence[float] | Tensor
"""One step size for all members, or one each."""

State = dict[str, Tensor]
"""What an optimizer remembers, (members, parameters) each."""


@dataclass(frozen=True, eq=False)
class SGD:
    """Gradient descent with heavy-ball momentum: v ← βv + ∇, θ ← θ − ηv.

    Args:
        rate: η.
        momentum: β.
        milestones: epochs from which the rate is multiplied by `factor`, each once more.
        factor: what it is multiplied by.
    """

    rate: Rate
    momentum: float = 0.0
    milestones: tuple[int, ...] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_fraction("momentum", self.momentum)
        _check_schedule(self.milestones, self.factor)

    def start(self, theta: Tensor) -> State:
        """Memory at rest."""
        return {"velocity": torch.zeros_like(theta)} if self.momentum else {}

    def step(self, theta: Tensor, slope: Tensor, state: State, rate: Tensor, _: int) -> None:
        """One update of θ in place."""
        if self.momentum:
            slope = state["velocity"].mul_(self.momentum).add_(slope)
        theta.addcmul_(slope, rate.unsqueeze(1), value=-1)

    def flow_time(self, rate: Tensor) -> Tensor:
        """Time of gradient flow that a step takes: η/(1−β)."""
        return rate.double() / (1 - self.momentum)

    def metric(self, state: State, count: int) -> Tensor | None:
        """Nothing: steps are along the gradient."""


@dataclass(frozen=True, eq=False)
class Adam:
    """Adam as in torch: θ ← θ − η m̂/(√v̂ + ε).

    Args:
        rate: η.
        betas: decay of the averages of ∇ and ∇².
        epsilon: ε.
        milestones: epochs from which the rate is multiplied by `factor`, each once more.
        factor: what it is multiplied by.
    """

    rate: Rate
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    milestones: tuple[int, ...] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        for beta in self.betas:
            _check_fraction("a beta", beta)
        _check_schedule(self.milestones, self.factor)

    def start(self, theta: Tensor) -> State:
        """Memory at rest."""
        return {"mean": torch.zeros_like(theta), "square": torch.zeros_like(theta)}

    def step(self, theta: Tensor, slope: Tensor, state: State, rate: Tensor, count: int) -> None:
        """One update of θ in place, the `count`-th."""
        first, second = self.betas
        mean = state["mean"].lerp_(slope, 1 - first)
        square = state["square"].mul_(second).addcmul_(slope, slope, value=1 - second)
        scale = square.sqrt().div_(math.sqrt(1 - second**count)).add_(self.epsilon)
        theta.addcmul_(mean / scale, (rate / (1 - first**count)).unsqueeze(1), value=-1)

    def flow_time(self, rate: Tensor) -> Tensor:
        """Time that a step takes in the flow θ' = −∇/(√v̂ + ε)."""
        return rate.double()

    def metric(self, state: State, count: int) -> Tensor:
        """√v̂ + ε: what turns a displacement into the force behind it."""
        return (
            state["square"].double().sqrt() / math.sqrt(1 - self.betas[1] ** count) + self.epsilon
        )


Optimizer = SGD | Adam


def rates(optimizer: Optimizer, members: int, like: Tensor) -> Tensor:
    """The first rate of every member."""
    given = numbers(optimizer.rate, like, what="rate")
    if given.shape not in ((), (members,)) or not bool(((given > 0) & given.isfinite()).all()):
        raise InputError(
            f"rate is {optimizer.rate!r}: pass a number above zero, or one for each of the "
            f"{members} members."
        )
    return given.expand(members).clone()


def factor_at(optimizer: Optimizer, epoch: int) -> float:
    """What the schedule multiplies the rates by in an epoch, counted from 0."""
    return optimizer.factor ** sum(epoch >= milestone for milestone in optimizer.milestones)


def _check_schedule(milestones: Any, factor: Any) -> None:
    whole = isinstance(milestones, Sequence) and all(isinstance(m, int) for m in milestones)
    if not whole or isinstance(milestones, str):
        raise InputError(f"milestones is {milestones!r}: pass epochs, as in (60, 100).")
    if not isinstance(factor, float | int) or not 0 < factor < math.inf:
        raise InputError(f"factor is {factor!r}: pass a number above zero.")


def _check_fraction(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < 1:
        raise InputError(f"{name} is {value!r}: pass a number from 0 to below 1.")
