"""Strengths along the training of Lightning's Trainer."""

import math
from collections.abc import Mapping
from typing import Any

from tacit.errors import InputError
from tacit.integrations.trainer_watch import Candidates, Known, TrainerWatch, missing_package
from tacit.objective.objective import Objective
from tacit.watching.training_watch import Watch

try:
    from lightning import pytorch as pl
except ImportError as error:
    raise missing_package("lightning", "lightning", error) from error


MOST_SHRUNK = 0.02
"""By how much strengths may come out too large where an epoch ends with fewer batches."""


class Callback(pl.Callback):
    """Watches the loop of a `lightning.Trainer`, and logs each row with its loggers.

    The arguments are those of `tacit.watch`, but for model and optimizer: the model is the
    objective's, and the optimizer that of `configure_optimizers`. `Fit.to_metrics` of each new row
    goes to all of `trainer.loggers`, at the update of the row. Training is bitwise the same as
    without.

    Checkpoints contain the state of the watch; a resumed run goes on with its rows.

    Traps: make the objective of the network inside the LightningModule, whose hooks belong to the
    Trainer. The Trainer's autocast (`precision="bf16-mixed"`) is not around the objective's loss:
    ∇L is more precise than training computed it, and slower; put `torch.autocast` into the loss to
    have it as in training. Lightning does not go on within an epoch where the data loader has no
    `state_dict`: it reads the epoch from its first batch, and then the window is no whole epoch.
    Where `accumulate_grad_batches` does not divide an epoch, Lightning makes the gradient of its
    last update too small: refused if strengths would come out more than 2 % too large; for data
    without a length, at the end of the epoch.

        callback = Callback(objective, tacit.optimizer_penalties, every=10)
        lightning.Trainer(callbacks=[callback]).fit(module, loader)
        print(callback.watch)

    Args:
        objective: the loss over the training data, without any penalty.
        regularizers: candidates, or a function of the optimizer and the model that returns them,
            such as `tacit.optimizer_penalties`: the Trainer makes the optimizer.
        every: a row after so many windows; of their last six at most.
        steps: the number of updates of a window; by default a window is an epoch.
        budget: the part of the training's time that watching may take. None: no limit.
        known: penalties that training did apply, with their strengths, or such a function.
    """

    def __init__(
        self,
        objective: Objective,
        regularizers: Candidates,
        *,
        every: int,
        steps: int | None = None,
        budget: float | None = 0.02,
        known: Known = None,
    ):
        self._saved: Mapping[str, Any] | None = None
        self._watching = TrainerWatch(
            objective, regularizers, every=every, steps=steps, budget=budget, known=known
        )

    @property
    def watch(self) -> Watch | None:
        """The watch with its rows; None before training begins."""
        return self._watching.watch

    @property
    def state_key(self) -> str:
        """The name of the state in checkpoints."""
        return "tacit.integrations.lightning.Callback"

    def state_dict(self) -> dict[str, Any]:
        """The state of the watch, for a checkpoint."""
        return self._watching.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there when training begins: the optimizer is restored after this."""
        self._saved = state_dict or None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to watch, or go on where the checkpoint was written."""
        if len(trainer.optimizers) != 1:
            raise InputError(
                f"the LightningModule has {len(trainer.optimizers)} optimizers, and one can be "
                "watched: call tacit.watch in the module, with the one that trains the objective."
            )
        _check_accumulation(trainer.num_training_batches, trainer.accumulate_grad_batches)
        self._watching.begin(trainer.optimizers[0], self._saved)
        self._saved = None

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """End the epoch with its last batch, before a checkpoint is written; log new rows."""
        if trainer.is_last_batch or batch_idx + 1 >= trainer.num_training_batches:
            # Only now known of data without a length, or where accumulation is scheduled.
            _check_accumulation(batch_idx + 1, trainer.accumulate_grad_batches)
            self._watching.end_epoch()
        self._log(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End an epoch that was cut short."""
        self._watching.end_epoch()
        self._log(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove the hooks, also after an exception."""
        self._watching.close()

    def _log(self, trainer: pl.Trainer) -> None:
        for metrics in self._watching.take_metrics():
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)


def _check_accumulation(batches: float, accumulated: int) -> None:
    """Refuse epochs whose last update is of fewer batches, if that matters.

    Lightning divides its gradient too by the number that is accumulated at other times. The mean
    gradient of all updates is then c∇L, c < 1, and a strength λ comes out as λ/c.
    """
    if not math.isfinite(batches):
        return
    updates = math.ceil(batches / accumulated)
    factor = batches / accumulated / updates
    if 1 / factor - 1 > MOST_SHRUNK:
        whole = int(batches // accumulated * accumulated)
        remedy = f", or train with limit_train_batches={whole}." if whole else "."
        raise InputError(
            f"accumulate_grad_batches={accumulated} does not divide the {batches:.0f} batches of "
            "an epoch: Lightning makes the gradient of its last update too small, and strengths "
            f"would come out {1 / factor - 1:.0%} too large. Accumulate a number of batches that "
            f"divides an epoch{remedy}"
        )
