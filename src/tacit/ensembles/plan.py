"""The training plan of an ensemble: the settings that all members share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tacit.ensembles.optimizers import SGD, Adam, Optimizer
from tacit.errors import InputError, check_choice, check_number, check_type, check_whole
from tacit.regularizers import Regularizer

Monitor = Literal["objective", "loss", "validation"]


@dataclass(frozen=True, eq=False)
class Stopping:
    """Stop a member when its monitored value has not improved for `patience` epochs.

    Args:
        patience: number of epochs in a row without improvement after which a member stops.
        min_delta: an epoch is an improvement if it lowers the best value by more than this.
        monitor: `objective` (the epoch's mean of loss + penalties), `loss` (the epoch's mean of
            the loss), or `validation` (the loss on the validation data after the epoch, without
            dropout).
        validation: (inputs, targets) or Data, for monitor="validation".
    """

    patience: int
    min_delta: float = 0.0
    monitor: Monitor = "objective"
    validation: Any = None

    def __post_init__(self) -> None:
        check_whole("patience", self.patience)
        check_number("min_delta", self.min_delta, least=0)
        check_choice("monitor", self.monitor, get_args(Monitor))
        if (self.monitor == "validation") != (self.validation is not None):
            state = "missing" if self.validation is None else "passed"
            raise InputError(
                f"monitor={self.monitor!r} with validation data {state}: pass both "
                "monitor='validation' and validation=(inputs, targets), or neither."
            )


@dataclass(frozen=True, eq=False)
class Plan:
    """Optimizer, epochs, batch size and stopping rule.

    Args:
        optimizer: `SGD` or `Adam`.
        epochs: the largest number of epochs; one number, or one per member.
        batch_size: the last batch of an epoch may be smaller.
        stopping: when to stop members earlier; by default never.
        averaged: regularizers with one coefficient whose gradient is averaged over the points of
            each recorded epoch, for `epoch_equations`. This is worth its cost where ∇R is
            nonlinear within the noise of the weights, as that of smooth_l1 is.
        recorded_epochs: how many of the last epochs a run records for `epoch_equations`. One
            epoch gives an estimate, several also give its error bars. Each one takes the memory
            of a few copies of the weights.
        compile: optionally `torch.compile`, applied to the function that is differentiated.
    """

    optimizer: Optimizer
    epochs: int | Sequence[int]
    batch_size: int
    stopping: Stopping | None = None
    averaged: Sequence[Regularizer] = ()
    recorded_epochs: int = 1
    compile: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        needed = "ensembles.SGD(rate) or ensembles.Adam(rate)"
        check_type("optimizer", self.optimizer, SGD | Adam, needed)
        check_type("stopping", self.stopping, Stopping | None, "ensembles.Stopping(patience)")
        needed = "a list of regularizers, as in [penalty]"
        check_type("averaged", self.averaged, Sequence, needed)
        check_whole("batch_size", self.batch_size)
        check_whole("recorded_epochs", self.recorded_epochs)
        for epochs in [self.epochs] if isinstance(self.epochs, int) else self.epochs:
            check_whole("epochs", epochs)

    def epochs_per_member(self, members: int) -> list[int]:
        """The largest number of epochs of each member."""
        if isinstance(self.epochs, int):
            return [self.epochs] * members
        if len(self.epochs) != members:
            raise InputError(
                f"epochs has {len(self.epochs)} numbers for {members} members: pass one for each."
            )
        return list(self.epochs)
