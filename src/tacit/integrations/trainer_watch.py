"""A watch of a training loop that a trainer runs: what the callbacks of all trainers share."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tacit.errors import InputError
from tacit.objective.objective import Objective, check_objective
from tacit.regularizers.family import Regularizer
from tacit.watching.rows import WatchRow
from tacit.watching.training_watch import Watch, watch

Candidates = (
    Regularizer | Iterable[Regularizer] | Callable[[Optimizer, nn.Module], Iterable[Regularizer]]
)
"""Regularizers, or a function of the optimizer and the model that returns them, for those that need
the optimizer, such as `tacit.optimizer_penalties`: the trainer makes it when training begins."""
Known = (
    Mapping[Regularizer, float]
    | Callable[[Optimizer, nn.Module], Mapping[Regularizer, float]]
    | None
)
"""Penalties that training did apply, with their strengths, or a function that returns them."""


class TrainerWatch:
    """A `Watch` that begins when the trainer has made its optimizer, and the metrics of new rows.

    It watches the model of the objective, whose names of parameters the equations have. A trainer
    may train a module around it.
    """

    def __init__(
        self,
        objective: Objective,
        regularizers: Candidates,
        *,
        every: int,
        steps: int | None,
        budget: float | None,
        known: Known,
    ):
        check_objective(objective, what="objective")
        self._objective, self._regularizers, self._known = objective, regularizers, known
        self._every, self._steps, self._budget = every, steps, budget
        self._rows: list[WatchRow] = []
        self.watch: Watch | None = None
        """None before training begins."""

    def begin(self, optimizer: Optimizer, state: Mapping[str, Any] | None = None) -> None:
        """Watch from now on, or go on from the state of an earlier watch."""
        self.close()
        model, regularizers, known = self._objective.model, self._regularizers, self._known
        if not isinstance(regularizers, Regularizer):
            regularizers = [*_call(regularizers, optimizer, model)]
        if callable(self._regularizers) and not regularizers:
            raise InputError(
                "the function of candidates returned none, as tacit.optimizer_penalties does for "
                "an optimizer without weight decay: pass the candidates themselves, as in "
                "[tacit.l2()]."
            )
        self._rows.clear()
        self.watch = watch(
            model, optimizer, self._objective, regularizers, every=self._every, steps=self._steps,
            budget=self._budget, known=_call(known, optimizer, model), log=self._rows.append,
        )  # fmt: skip
        if state is not None:
            self.watch.load_state_dict(state)

    def end_epoch(self) -> None:
        """End the epoch, if windows are epochs and this one was not ended yet."""
        if self._steps is None and self.watch is not None and self.watch.position:
            self.watch.end_epoch()

    def take_metrics(self) -> list[dict[str, float]]:
        """The metrics of the rows since the last call."""
        rows = [*self._rows]
        self._rows.clear()
        return [row.metrics() for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """That of the watch."""
        return {} if self.watch is None else self.watch.state_dict()

    def close(self) -> None:
        """Remove all hooks from the optimizer; the rows remain."""
        if self.watch is not None:
            self.watch.close()


def missing_package(package: str, extra: str, error: ImportError) -> InputError:
    """What to install for a callback."""
    return InputError(
        f"tacit.integrations.{extra} needs {package} ({error}): pip install 'tacit[{extra}]'."
    )


def _call(argument: Any, optimizer: Optimizer, model: nn.Module) -> Any:
    """The argument, or what it returns if it is a function."""
    return argument(optimizer, model) if callable(argument) else argument
