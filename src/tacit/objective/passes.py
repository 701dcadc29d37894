"""One pass over the data: batch after batch through a borrowed model, draw after draw."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import checks as probes
from tacit.objective.batches import Batches, move_batch, tensors_in
from tacit.objective.borrowing import Borrowed, forked_randomness, mode
from tacit.objective.losses import BatchMean, Measure, Spreader, split_batch
from tacit.objective.params import Params, trainable
from tacit.objective.randomness import Noise, seed_devices

Item = TypeVar("Item")

PATIENCE = 2.0
"""Seconds of silence before a bar is drawn: short passes stay quiet."""

Found = TypeVar("Found")
Use = Callable[[Tensor, float], None]
"""What is done with a batch's mean loss and its weight, while the parameters are swapped in."""


class Pass(NamedTuple):
    """What a whole pass found: the mean loss, the weight behind it, and the units counted."""

    value: float
    weight: float
    units: int
    last: Any
    """The last batch."""


@dataclass(frozen=True, eq=False)
class Stream:
    """A model, how its batches are measured, the batches, and where its randomness comes from."""

    model: nn.Module
    measure: Measure
    batches: Batches
    label: str
    spread: Spreader
    """The same batches unit by unit."""
    masks: bool
    """Whether batches may hold -inf, as additive attention masks do by right."""
    training: bool
    draws: int
    seed: int
    paired: bool
    """Whether batches are measured with noise of their own, mirrored in pairs of draws."""

    @property
    def devices(self) -> set[torch.device]:
        """Where the model's parameters are."""
        return {p.device for p in self.model.parameters()}

    @contextmanager
    def ready(self, *, training: bool) -> Iterator[None]:
        """The model in the right mode and a forked random state; both are put back."""
        forked = forked_randomness(self.devices, self.batches.generators)
        with forked, mode(self.model, training=training):
            yield

    def read(self) -> Iterator[tuple[Any, Tensor | None]]:
        """Batches and their weights, checked, where the model is."""
        batches = track(self.batches.read(), total=self.batches.length, label=self.label)
        for index, (batch, weights) in enumerate(batches):
            moved, weights = self.moved((batch, weights))
            probes.check_batch(moved, index, masks=self.masks)
            yield moved, weights

    def moved(self, batch: Any) -> Any:
        """A batch where the model is."""
        return move_batch(batch, next(iter(trainable(self.model).values())).device)

    def evaluate(
        self,
        params: Params,
        batch: Any,
        weights: Tensor | None,
        *,
        draw: int | None = None,
        index: int = 0,
        use: Use | None = None,
    ) -> BatchMean:
        """The mean loss of one batch, in one draw."""

        def measure(model: nn.Module, noise: Noise | None) -> BatchMean:
            found = self.measure(model, batch, weights, noise)
            if use is not None:
                probes.check_loss(found.mean, index)
                use(found.mean, found.weight)
            return found

        return self.lend(params, measure, draw=draw, index=index)

    def lend(
        self,
        params: Params,
        function: Callable[[nn.Module, Noise | None], Found],
        *,
        draw: int | None = None,
        index: int = 0,
    ) -> Found:
        """What a function of the model gives; a draw depends on (seed, draw, batch) alone."""
        if self.training and draw is not None:
            state = np.random.SeedSequence([self.seed, draw, index]).generate_state(1, np.uint64)
            seed_devices(int(state[0]) >> 1, self.devices)
        noise = Noise(self.seed, draw or 0, index) if self.paired else None
        return Borrowed(self.model).at(params, lambda model: function(model, noise))

    def drawn(self, draws: Sequence[int] | None) -> Sequence[int]:
        """The draws to average: those given, or all."""
        return range(self.draws if self.training else 1) if draws is None else draws

    def run(self, params: Params, use: Use, *, draws: Sequence[int] | None = None) -> Pass:
        """One pass; every batch's mean loss goes to `use` with its part of the weight."""
        draws = self.drawn(draws)
        total, weight, units, batch = 0.0, 0.0, 0, None
        with self.ready(training=self.training):
            for index, (batch, weights) in enumerate(self.read()):
                part = BatchMean(torch.zeros(()), 0.0, 0)
                for draw in draws:
                    part = self.evaluate(
                        params,
                        batch,
                        weights,
                        draw=draw,
                        index=index,
                        use=lambda mean, weight: use(mean, weight / len(draws)),
                    )
                    total += float(part.mean.detach()) * part.weight / len(draws)
                weight, units = weight + part.weight, units + part.units
        if not weight:
            raise InputError(
                f"the data gave {units} examples of total weight 0: tacit reads the data more than "
                "once. Pass data that starts anew, such as a list of batches, with weight."
            )
        return Pass(total / weight, weight, units, batch)

    def repeats_order(self, *, shuffled: bool = True) -> bool:
        """Whether two passes begin with the same batch, as far as they can be told apart.

        Passes fork the random state, so that a shuffled loader repeats its order; unless
        `shuffled`, it must be the same under any random state, as labels beside the data need.
        """
        starts = []
        for seed in range(2):
            with self.ready(training=False):
                if not shuffled:
                    seed_devices(seed, self.devices)
                    for generator in self.batches.generators:
                        generator.manual_seed(seed)
                batch = next(self.read(), (None, None))[0]
            starts.append(list(tensors_in(batch)))
        return len(starts[0]) == len(starts[1]) and all(map(torch.equal, *starts))

    def predictions(self, where: Sequence[Params], *, single: bool) -> tuple[list[Tensor], Any]:
        """Outputs at each point, in eval mode, and the last target; refused where not `single`."""
        outputs: list[list[Any]] = [[] for _ in where]
        target = None
        with self.ready(training=False), torch.no_grad():
            for batch, _ in self.read():
                for params, held in zip(where, outputs, strict=True):
                    output = None
                    if single:
                        inputs, target = split_batch(batch)
                        output = Borrowed(self.model).at(params, lambda m, i=inputs: m(*i))
                    if not isinstance(output, Tensor):
                        raise InputError(
                            "predictions need model(*inputs) to be one tensor, from Objective("
                            "model, loss, data). Pass outputs=, a function from parameters to "
                            "predictions."
                        )
                    held.append(output)
        return [torch.cat(held) for held in outputs], target


def check_count(units: int, before: int | None) -> None:
    """Refuse data that gave another number of examples before."""
    if before not in (None, units):
        raise InputError(
            f"the data gave {units} examples, where an earlier pass gave {before}: tacit "
            "reads the data more than once. Pass data that starts anew and stays the same, "
            "such as a list of batches."
        )


def track(items: Iterable[Item], *, total: int | None, label: str) -> Iterator[Item]:
    """Yield the items; draw a bar with the time left once they have taken a while."""
    if not sys.stderr.isatty():
        yield from items
        return
    start, bar, task = time.monotonic(), None, None
    try:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - start > PATIENCE:
                bar = new_bar()
                task = bar.add_task(label, total=total, completed=done)
            yield item
            if bar is not None and task is not None:
                bar.update(task, completed=done + 1)
    finally:
        if bar is not None:
            bar.stop()


def new_bar():  # rich is imported only where a bar is drawn
    """A started bar with the time left, on the error stream; the caller stops it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Left())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar
