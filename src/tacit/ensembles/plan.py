"""How an ensemble is trained: what all members have in common."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tacit.ensembles.optimizers import SGD, Adam, Optimizer
from tacit.errors import InputError
from tacit.regularizers import Regularizer

Monitor = Literal["objective", "loss", "validation"]


@dataclass(frozen=True, eq=False)
class Stopping:
    """Stop a member when its monitored value has not improved for `patience` epochs.

    Args:
        patience: epochs in a row without improvement after which it stops.
        min_delta: what counts as an improvement must lower the best value by more than this.
        monitor: `objective` (the epoch's mean of loss + penalty), `loss` (of the loss alone), or
            `validation` (loss on the validation data after the epoch, without dropout).
        validation: (inputs, targets) or Data, for the last of them.
    """

    patience: int
    min_delta: float = 0.0
    monitor: Monitor = "objective"
    validation: Any = None

    def __post_init__(self) -> None:
        check_whole("patience", self.patience, 1)
        if not isinstance(self.min_delta, float | int) or not 0 <= self.min_delta < math.inf:
            raise InputError(f"min_delta is {self.min_delta!r}: pass a number, 0 or above.")
        if self.monitor not in get_args(Monitor):
            raise InputError(
                f"monitor is {self.monitor!r}: pass one of {', '.join(get_args(Monitor))}."
            )
        if (self.monitor == "validation") != (self.validation is not None):
            raise InputError(
                f"monitor={self.monitor!r} with validation data "
                f"{'given' if self.validation is not None else 'missing'}: pass both "
                "monitor='validation' and validation=(inputs, targets), or neither."
            )


@dataclass(frozen=True, eq=False)
class Plan:
    """Optimizer, epochs, batch size and stopping rule.

    Args:
        optimizer: `SGD` or `Adam`.
        epochs: at most so many; one number, or one a member.
        batch_size: the last batch of an epoch may be smaller.
        stopping: when members stop earlier, if ever.
        averaged: regularizers of one coefficient whose gradient is averaged over the points of the
            last epoch, for `epoch_equations`; worth it where a gradient bends within the noise of
            the weights, as that of smooth_l1 does.
        kept: how many of the last epochs a run keeps for `epoch_equations`: one gives an estimate,
            several its error bars too. Each takes as much memory as a few copies of the weights.
        compile: optionally `torch.compile`, applied to the function that is differentiated.
    """

    optimizer: Optimizer
    epochs: int | Sequence[int]
    batch_size: int
    stopping: Stopping | None = None
    averaged: Sequence[Regularizer] = ()
    kept: int = 1
    compile: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, SGD | Adam):
            raise InputError(
                f"optimizer is a {type(self.optimizer).__name__}: pass ensembles.SGD(rate) or "
                "ensembles.Adam(rate)."
            )
        if self.stopping is not None and not isinstance(self.stopping, Stopping):
            raise InputError(f"stopping is {self.stopping!r}: pass ensembles.Stopping(patience).")
        if not isinstance(self.averaged, Sequence):
            raise InputError("averaged is no list: pass a list of regularizers, as in [penalty].")
        check_whole("batch_size", self.batch_size, 1)
        check_whole("kept", self.kept, 1)
        for number in [self.epochs] if isinstance(self.epochs, int) else self.epochs:
            check_whole("epochs", number, 1)

    def epochs_of(self, members: int) -> list[int]:
        """The most epochs of every member."""
        if isinstance(self.epochs, int):
            return [self.epochs] * members
        if len(self.epochs) != members:
            raise InputError(
                f"{len(self.epochs)} numbers of epochs for {members} members: pass one a member, "
                "or one number."
            )
        return list(self.epochs)


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is not a whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is {value!r}: pass a whole number, at least {least}.")
