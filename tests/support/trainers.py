"""One training run in a plain loop, in Hugging Face's Trainer and in Lightning's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning import pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import tacit
from support.models import random_data
from tacit.integrations import huggingface, lightning

BATCH = 8


class Network(nn.Module):
    """Returns outputs for plain loops, and its loss too where the Trainer passes targets."""

    def __init__(self, dropout, batch_norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs, targets=None):
        outputs = self.last(self.dropout(torch.tanh(self.norm(self.first(inputs)))))
        return outputs if targets is None else {"loss": F.mse_loss(outputs, targets)}


@dataclass
class Run:
    """How a network is trained and watched."""

    every: int = 4
    steps: int | None = None
    accumulate: int = 1
    clip: float = 0.0
    bf16: bool = False
    dropout: float = 0.0
    """The loops draw from the random state in their own ways: their masks differ."""
    batch_norm: bool = False
    schedule: bool = False
    """Whether the rate falls at every update."""
    evaluate: bool = False
    """Whether the trainer evaluates after every epoch."""
    stop: int = 0
    """After how many updates training is stopped early; never where it is 0."""
    dtype: torch.dtype = torch.float64
    epochs: int = 9
    checkpoints: int = 0
    """A checkpoint after every so many updates; after every epoch where it is 0."""
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01, "weight_decay": 0.3})
    watched: bool = True

    def __post_init__(self):
        self.data = tuple(tensor.to(self.dtype) for tensor in random_data(0, count=96))
        self.model = Network(self.dropout, self.batch_norm).to(self.dtype)
        torch.manual_seed(1)

    def make_optimizer(self):
        return self.optimizer(self.model.parameters(), **self.options)

    def make_schedule(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98 if self.schedule else 1.0)

    def objective(self):
        if self.batch_norm:
            return self.plain_objective()

        def loss(model, batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                return F.mse_loss(model(batch[0]), batch[1], reduction="none").flatten()

        return tacit.Objective.from_batch_loss(self.model, loss, self.data)

    def plain_objective(self):
        """Without autocast."""
        options = {"batch_norm": "batch", "batch_size": BATCH} if self.batch_norm else {}
        return tacit.Objective(self.model, F.mse_loss, self.data, **options)

    def watching(self):
        """The arguments of a callback."""
        arguments = (self.objective(), tacit.optimizer_penalties)
        return arguments, {"every": self.every, "steps": self.steps, "budget": None}


@dataclass
class Result:
    """What a run leaves: its rows, its weights bit by bit, and what was logged."""

    rows: list[tuple[int, int, dict[str, float]]]
    weights: list[bytes]
    logged: dict[str, list[tuple[int, float]]]
    """By name, the updates and values in the event files of TensorBoard."""


def plain(run, folder, *, resume=None):
    """In a loop of one's own."""
    model, optimizer = run.model, run.make_optimizer()
    schedule, updates = run.make_schedule(optimizer), 0
    arguments, options = run.watching()
    objective, penalties = arguments
    watch = tacit.watch(
        model, optimizer, objective, list(penalties(optimizer, model)), **options
    ) if run.watched else None  # fmt: skip
    model.train()
    batches = list(zip(*(tensor.split(BATCH) for tensor in run.data), strict=True))
    for _ in range(run.epochs):
        for number, (inputs, targets) in enumerate(batches, start=1):
            with torch.autocast("cpu", torch.bfloat16, enabled=run.bf16):
                loss = F.mse_loss(model(inputs), targets)
            (loss / run.accumulate).backward()
            if number % run.accumulate == 0:
                if run.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), run.clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                updates += 1
                if updates == run.stop:
                    break
        if watch and run.steps is None:
            watch.end_epoch()
        if run.stop and updates == run.stop:
            break
    return _result(run, watch, folder)


class Stop(TrainerCallback):
    """Stops the Trainer of transformers early."""

    def __init__(self, update):
        self.update = update

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.update


class LightningStop(pl.Callback):
    """Stops the Trainer of Lightning early."""

    def __init__(self, update):
        self.update = update

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == self.update


class FixedOrder(Trainer):
    """Reads the data in their order."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=BATCH)


def hugging_face(run, folder, *, resume=None):
    """In the Trainer of transformers."""
    inputs, targets = run.data
    arguments = TrainingArguments(
        str(folder), use_cpu=True, num_train_epochs=run.epochs, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=run.accumulate, max_grad_norm=run.clip, bf16=run.bf16,
        lr_scheduler_type="constant", report_to="tensorboard", logging_steps=5, disable_tqdm=True,
        save_strategy="steps" if run.checkpoints else "epoch", save_steps=run.checkpoints or 1,
        remove_unused_columns=False, dataloader_pin_memory=False, label_names=["targets"],
        eval_strategy="epoch" if run.evaluate else "no", prediction_loss_only=True,
    )  # fmt: skip
    data = [{"inputs": a, "targets": b} for a, b in zip(inputs, targets, strict=True)]
    optimizer = run.make_optimizer()
    trainer = FixedOrder(
        run.model, arguments, optimizers=(optimizer, run.make_schedule(optimizer)),
        train_dataset=data, eval_dataset=data[:24],
    )  # fmt: skip
    if run.stop:
        trainer.add_callback(Stop(run.stop))
    callback = None
    if run.watched:
        positional, options = run.watching()
        objective = run.plain_objective()  # the Trainer's own autocast is around the model
        callback = huggingface.Callback(trainer, objective, *positional[1:], **options)
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return _result(run, callback and callback.watch, folder)


class Module(pl.LightningModule):
    """The network with Lightning's hooks."""

    def __init__(self, run):
        super().__init__()
        self.run, self.network = run, run.model

    def training_step(self, batch, _):
        loss = F.mse_loss(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = self.run.make_optimizer()
        schedule = {"scheduler": self.run.make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Validated(Module):
    """The same, with an evaluation."""

    def validation_step(self, batch, _):
        self.log("validation", F.mse_loss(self.network(batch[0]), batch[1]))


class Loader:
    """Batches in their order, with a state, so that Lightning goes on within an epoch."""

    def __init__(self, data):
        self.batches = list(zip(*(tensor.split(BATCH) for tensor in data), strict=True))
        self.read, self.skipped = 0, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.read, self.skipped = self.skipped, 0
        for batch in self.batches[self.read :]:
            self.read += 1
            yield batch

    def state_dict(self):
        return {"read": self.read % len(self)}

    def load_state_dict(self, state):
        self.skipped = state["read"]


def lightning_trainer(run, folder, *, resume=None):
    """In the Trainer of Lightning."""
    callback = None
    if run.watched:
        positional, options = run.watching()
        callback = lightning.Callback(*positional, **options)
    saving = ModelCheckpoint(
        Path(folder) / "checkpoints", "{step}", save_top_k=-1, auto_insert_metric_name=False,
        every_n_train_steps=run.checkpoints or None,
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=run.epochs, accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip or None, precision="bf16-mixed" if run.bf16 else None,
        callbacks=[c for c in (saving, run.stop and LightningStop(run.stop), callback) if c],
        logger=TensorBoardLogger(folder), enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=5,
    )  # fmt: skip
    module = Validated(run) if run.evaluate else Module(run)
    validation = DataLoader(TensorDataset(*run.data), 24) if run.evaluate else None
    trainer.fit(module, Loader(run.data), validation, ckpt_path=resume)
    return _result(run, callback and callback.watch, folder)


LOOPS = {"plain": plain, "Hugging Face": hugging_face, "Lightning": lightning_trainer}


def _result(run, watch, folder):
    rows = [(row.update, row.window, row.metrics()) for row in watch.rows] if watch else []
    weights = [t.detach().numpy().tobytes() for t in run.model.state_dict().values()]
    return Result(rows, weights, read_events(folder))


def read_events(folder):
    """By name, the updates and values of all scalars in the event files below a folder."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    for parent in {path.parent for path in Path(folder).rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(parent))
        events.Reload()
        for name in events.Tags()["scalars"]:
            scalars[name] = [(event.step, event.value) for event in events.Scalars(name)]
    return scalars
