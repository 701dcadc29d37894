"""SGD and Adam on flat rows of parameters: torch's updates, with one step size per member."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.ensembles.checks import as_numbers
from tacit.errors import InputError

Rate = float | Sequence[float] | Tensor
"""One step size for all members, or one per member."""

State = dict[str, Tensor]
"""The running averages of an optimizer, each of shape (members, parameters)."""


@dataclass(frozen=True, eq=False)
class SGD:
    """Gradient descent with heavy-ball momentum: v ← βv + ∇, θ ← θ − ηv.

    Args:
        rate: the step size η.
        momentum: β.
        milestones: epochs at which the step size is multiplied by `factor`.
        factor: the multiplier of the step size at each milestone.
    """

    rate: Rate
    momentum: float = 0.0
    milestones: tuple[int, ...] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_fraction("momentum", self.momentum)
        _check_schedule(self.milestones, self.factor)

    def initial_state(self, theta: Tensor) -> State:
        """The state before the first step."""
        return {"velocity": torch.zeros_like(theta)} if self.momentum else {}

    def step(self, theta: Tensor, gradient: Tensor, state: State, rate: Tensor, _: int) -> None:
        """Update θ in place."""
        if self.momentum:
            gradient = state["velocity"].mul_(self.momentum).add_(gradient)
        theta.addcmul_(gradient, rate.unsqueeze(1), value=-1)

    def flow_time(self, rate: Tensor) -> Tensor:
        """Time of gradient flow that one step corresponds to: η/(1−β)."""
        return rate.double() / (1 - self.momentum)

    def metric(self, state: State, count: int) -> Tensor | None:
        """None: the steps follow the gradient."""


@dataclass(frozen=True, eq=False)
class Adam:
    """Adam as in torch: θ ← θ − η m̂/(√v̂ + ε).

    Args:
        rate: the step size η.
        betas: decay rates of the running averages of ∇ and ∇².
        epsilon: ε.
        milestones: epochs at which the step size is multiplied by `factor`.
        factor: the multiplier of the step size at each milestone.
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

    def initial_state(self, theta: Tensor) -> State:
        """The state before the first step."""
        return {"mean": torch.zeros_like(theta), "square": torch.zeros_like(theta)}

    def step(self, theta: Tensor, gradient: Tensor, state: State, rate: Tensor, count: int) -> None:
        """Update θ in place; `count` is the number of this step, from 1."""
        first, second = self.betas
        mean = state["mean"].lerp_(gradient, 1 - first)
        square = state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = square.sqrt().div_(math.sqrt(1 - second**count)).add_(self.epsilon)
        theta.addcmul_(mean / scale, (rate / (1 - first**count)).unsqueeze(1), value=-1)

    def flow_time(self, rate: Tensor) -> Tensor:
        """Time in the flow θ' = −∇/(√v̂ + ε) that one step corresponds to: η."""
        return rate.double()

    def metric(self, state: State, count: int) -> Tensor:
        """√v̂ + ε after `count` steps: displacement · metric / time is the mean −∇."""
        return (
            state["square"].double().sqrt() / math.sqrt(1 - self.betas[1] ** count) + self.epsilon
        )


Optimizer = SGD | Adam


def initial_rates(optimizer: Optimizer, members: int, like: Tensor) -> Tensor:
    """Check the step sizes and return one per member, before any milestone."""
    rates = as_numbers(optimizer.rate, like, what="rate")
    if rates.shape not in ((), (members,)) or not bool(((rates > 0) & rates.isfinite()).all()):
        raise InputError(
            f"rate is {optimizer.rate!r}: pass a number above zero, or one for each of the "
            f"{members} members."
        )
    return rates.expand(members).clone()


def schedule_factor(optimizer: Optimizer, epoch: int) -> float:
    """The factor by which the milestones change the step sizes in an epoch, counted from 0."""
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
