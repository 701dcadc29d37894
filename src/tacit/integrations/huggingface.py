"""Strengths along the training of Hugging Face's Trainer."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from tacit.errors import InputError, check_type
from tacit.integrations.trainer_watch import Candidates, Known, TrainerWatch, missing_package
from tacit.objective.objective import Objective
from tacit.watching.training_watch import Watch

try:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise missing_package("transformers", "huggingface", error) from error

FILE = "tacit_watch.pt"
"""The state of the watch, in the folder of each checkpoint."""


class Callback(TrainerCallback):
    """Watches the loop of a `transformers.Trainer`, and logs each row where the Trainer logs.

    The arguments are those of `tacit.watch`, but for model and optimizer: the model is the
    objective's, and the optimizer the Trainer's. `Fit.to_metrics` of each new row goes through
    `trainer.log`, at the update of the row: to TensorBoard, W&B, MLflow and other trackers, and to
    `trainer.state.log_history`. The losses that the Trainer logs are those without the callback,
    and so are the weights.

    Each checkpoint contains the state of the watch; a resumed run goes on with its rows.

    Traps: the Trainer clips gradients by default (`max_grad_norm=1.0`): where it does, penalties
    come out too large, and the fit says so. Its default scheduler lets the rate fall to zero at the
    last update. With `bf16` or `fp16` the Trainer's autocast is around the model, also when
    ∇L is evaluated.

        callback = Callback(trainer, objective, tacit.optimizer_penalties, every=10)
        trainer.add_callback(callback)
        trainer.train()
        print(callback.watch)

    Args:
        trainer: the Trainer, to which the callback is added afterwards.
        objective: the loss over the training data, without any penalty, of the Trainer's model.
        regularizers: candidates, or a function of the optimizer and the model that returns them,
            such as `tacit.optimizer_penalties`: the Trainer makes the optimizer.
        every: a row after so many windows; of their last six at most.
        steps: the number of updates of a window; by default a window is an epoch.
        budget: the part of the training's time that watching may take. None: no limit.
        known: penalties that training did apply, with their strengths, or such a function.
        checkpoint: the folder of the checkpoint that training is resumed from, if it is none of
            this Trainer's `output_dir`; False to begin anew.
    """

    def __init__(  # what is watched, then keyword options
        self,
        trainer: Trainer,
        objective: Objective,
        regularizers: Candidates,
        *,
        every: int,
        steps: int | None = None,
        budget: float | None = 0.02,
        known: Known = None,
        checkpoint: str | Path | Literal[False] | None = None,
    ):
        check_type("trainer", trainer, Trainer, "the transformers.Trainer to be watched")
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise InputError(
                "the Trainer divides the weights among processes (FSDP or DeepSpeed), and the "
                "equations need whole ones: train without, or take tacit.estimate afterwards."
            )
        self._trainer = trainer
        self._checkpoint: str | Path | bool | None = checkpoint
        self._watching = TrainerWatch(
            objective, regularizers, every=every, steps=steps, budget=budget, known=known
        )

    @property
    def watch(self) -> Watch | None:
        """The watch with its rows; None before training begins."""
        return self._watching.watch

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer | None = None,
        **_: Any,
    ) -> None:
        """Begin to watch, or go on where the checkpoint was written."""
        if optimizer is None:
            raise InputError("the Trainer has no optimizer when training begins.")
        saved = self._load(args, state) if state.global_step else None
        self._watching.begin(optimizer, saved)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End the epoch with its last update, before a checkpoint is written; log new rows."""
        if state.epoch is not None and float(state.epoch).is_integer():
            self._watching.end_epoch()
        self._log(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End an epoch that was cut short."""
        self._watching.end_epoch()
        self._log(control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save the state of the watch beside the Trainer's."""
        folder = _folder(args, state)
        # The trials of a search for hyperparameters have folders of their own, and do not resume.
        if state.is_world_process_zero and folder.is_dir():
            torch.save(self._watching.state_dict(), folder / FILE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Remove the hooks."""
        self._watching.close()

    def _log(self, control: TrainerControl) -> None:
        """Log new rows through the Trainer, which then logs its loss as it would have done.

        The Trainer takes any call of its `log` for that of the loss, and lowers `should_log`.
        """
        should_log = control.should_log
        for metrics in self._watching.take_metrics():
            self._trainer.log(metrics)
            control.should_log = self._trainer.control.should_log = should_log

    def _load(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any] | None:
        """The state of the watch in the checkpoint that training is resumed from."""
        if isinstance(self._checkpoint, bool):
            return None
        if self._checkpoint is not None:
            folders = [Path(self._checkpoint)]
        else:
            given = args.resume_from_checkpoint
            folders = [Path(given)] if isinstance(given, str) else []
            folders.append(_folder(args, state))
        for folder in folders:
            if (folder / FILE).is_file():
                return torch.load(folder / FILE, map_location="cpu", weights_only=True)
        raise InputError(
            f"training was resumed at update {state.global_step}, and there is no {FILE} in "
            f"{' or '.join(map(str, folders))}: pass checkpoint= the folder that training was "
            "resumed from, or checkpoint=False if it was trained without this callback."
        )


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer writes a checkpoint of now."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
