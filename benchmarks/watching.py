"""Time that watching a training loop takes, relative to the loop's time without it."""

import runpy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from table import Row
from torch import Tensor, nn
from torch.nn import functional as F

import tacit

EXAMPLE = Path(__file__).parents[1] / "examples/language_model.py"
WIDTH, HEADS, BLOCKS, CONTEXT, SEQUENCES, BATCH = 320, 5, 8, 128, 512, 4
QUICK_SEQUENCES = 32
STEPS = 4
"""Updates of a window of the language model."""
MAX_LANGUAGE_MODEL, MAX_DIGITS = 0.02, 0.04
SECONDS = 75.0
"""Of training per model, about."""


class Loop(NamedTuple):
    """A training loop, by its parts."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    objective: tacit.Objective
    loss: Callable[[Tensor], Tensor]
    """Of the model on a batch, by the numbers of its examples."""
    examples: int
    batch: int
    steps: int | None
    """Updates of a window; None where windows are epochs."""

    def train(self, epochs: int, watch: tacit.watching.Watch | None, seconds: float) -> list[float]:
        """Train, and return the seconds of all updates; negative where they were recorded."""
        order = torch.Generator().manual_seed(1)
        times: list[float] = []
        begin = time.perf_counter()
        for _ in range(epochs):
            batches = torch.randperm(self.examples, generator=order).split(self.batch)
            for number, rows in enumerate(batches, start=1):
                sign = -1 if watch and watch.observing else 1
                start = time.perf_counter()
                self.optimizer.zero_grad()
                self.loss(rows).backward()
                self.optimizer.step()
                if watch and self.steps is None and number == len(batches):
                    watch.end_epoch()
                times.append(sign * (time.perf_counter() - start))
                if time.perf_counter() - begin > seconds:
                    return times
        return times

    def weights(self) -> bytes:
        """The weights, and batch norm's statistics, bit by bit."""
        return b"".join(t.numpy().tobytes() for t in self.model.state_dict().values())


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """With weight decay of matrices alone."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate)


def language_model(*, quick: bool, device: str = "cpu") -> Loop:
    """A GPT of 10 million weights on the source code of Python's library, and its batches."""
    example = runpy.run_path(str(EXAMPLE))
    shape = (64, 2, 2, 32) if quick else (WIDTH, HEADS, BLOCKS, CONTEXT)
    count = QUICK_SEQUENCES if quick else SEQUENCES
    size = example["Size"](*shape, count, BATCH, 1, 1, 3e-4, 1.0)
    torch.manual_seed(0)
    model = example["GPT"](size).to(device)
    sequences = example["read_sequences"](count, size.context + 1).to(device)
    losses = example["token_losses"]
    objective = tacit.Objective.from_batch_loss(model, losses, (sequences,), batch_size=BATCH)
    return Loop(
        model, adamw(model, 3e-4), objective, lambda rows: losses(model, (sequences[rows],)).mean(),
        count, BATCH, STEPS,
    )  # fmt: skip


def digits_network() -> Loop:
    """The convolutional network with batch norm of README, on data of the digits' size."""
    torch.manual_seed(1)
    X, y = torch.rand(1792, 1, 8, 8).double(), torch.randint(10, (1792,))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    ).double()  # fmt: skip
    batches = {"batch_norm": "batch", "batch_size": 64, "draws": 4}
    objective = tacit.Objective(model, F.cross_entropy, (X, y), **batches)
    return Loop(
        model, adamw(model, 1e-2), objective,
        lambda rows: F.cross_entropy(model(X[rows]), y[rows]), len(X), 64, None,
    )  # fmt: skip


def watched(loop: Loop, every: int, *, budget: float | None = 0.02) -> tacit.watching.Watch:
    """A watch of what the optimizer applies."""
    penalties = list(tacit.optimizer_penalties(loop.optimizer, loop.model))
    return tacit.watch(
        loop.model, loop.optimizer, loop.objective, penalties,
        every=every, steps=loop.steps, budget=budget,
    )  # fmt: skip


def overhead_of(name: str, loop: Loop, every: int, bound: float, *, quick: bool) -> list[Row]:
    """The excess of a watched run over its updates at the mean time of those not recorded."""
    watch = watched(loop, every)
    times = loop.train(2 if quick else 10**6, watch, SECONDS)
    plain = [seconds for seconds in times if seconds > 0]
    unobserved = sum(plain) / max(1, len(plain))
    total = sum(map(abs, times))
    excess = total / (len(times) * unobserved) - 1 if plain else 0.0
    measured = f"{excess:.1%} ({len(times)} updates of {unobserved * 1e3:.1f} ms"
    measured += f", {len(times) - len(plain)} recorded; {len(watch.rows)} rows; "
    measured += f"its clock says {watch.overhead:.1%})"
    watch.close()
    rows = [Row(f"watching {name} / training without", measured, excess, bound)]
    if not watch.rows:
        when = " ".join(str(watch).partition("yet: ")[2].split())
        rows.append(Row("  its first row", when))
    return rows


def identity_of(
    name: str, make: Callable[[], Loop], updates: int, every: int, budget: float | None
) -> Row:
    """Whether training is bitwise the same with rows being written and without a watch."""
    weights, rows = [], 0
    for is_watched in (True, False):
        loop = make()
        watch = watched(loop, every, budget=budget) if is_watched else None
        epochs = -(-updates // -(-loop.examples // loop.batch))
        loop.train(epochs, watch, float("inf"))
        weights.append(loop.weights())
        rows += len(watch.rows) if watch else 0
    different = float(weights[0] != weights[1])
    text = "different" if different else "the same, bit by bit"
    return Row(f"  its weights with {rows} rows written, and without", text, different, 0.0)


def measure(*, quick: bool) -> list[Row]:
    """The part of the training's time that watching takes, at the default budget."""
    make = partial(language_model, quick=quick)
    gpt = "a GPT of 10 million weights"
    return [
        *overhead_of(gpt, make(), 16, MAX_LANGUAGE_MODEL, quick=quick),
        identity_of(gpt, partial(language_model, quick=True), 128, 4, None),
        *overhead_of("README's network", digits_network(), 10, MAX_DIGITS, quick=quick),
        identity_of("README's network", digits_network, 168, 4, None),
    ]
