"""One pass over the data: every batch, in every draw, through a borrowed model."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.batches import Batches, check_batch_finite, move_batch, tensors_in
from tacit.objective.borrowing import call_with_params, forked_randomness, temporary_mode
from tacit.objective.losses import BatchMean, LossReader, split_batch
from tacit.objective.params import Params, check_finite, float64_zeros
from tacit.objective.randomness import Noise, seed_devices, seed_draw

Item = TypeVar("Item")
Value = TypeVar("Value")

PATIENCE = 2.0
"""Seconds before a progress bar is drawn, so that short passes print nothing."""

UseMean = Callable[[Tensor, float], None]
"""use(mean, weight): called with a batch's mean loss while the parameters are swapped in."""


class PassResult(NamedTuple):
    """The result of one pass: mean loss, total weight, number of examples, and the last batch."""

    value: float
    weight: float
    examples: int
    last_batch: Any


@dataclass(frozen=True, eq=False)
class Passes:
    """How to run passes over the data: the model, its loss, the batches and the randomness."""

    model: nn.Module
    loss: LossReader
    batches: Batches
    label: str
    allow_masks: bool
    """Whether batches may hold -inf, as additive attention masks do."""
    training: bool
    draws: int
    seed: int
    paired: bool
    """Whether the loss takes its noise as an argument, mirrored in pairs of draws."""

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the model's parameters."""
        return {p.device for p in self.model.parameters()}

    @contextmanager
    def prepared(self, *, training: bool) -> Iterator[None]:
        """Set the model's mode and fork the random state; both are restored."""
        forked = forked_randomness(self.devices, self.batches.generators)
        with forked, temporary_mode(self.model, training=training):
            yield

    def read(self) -> Iterator[tuple[Any, Tensor | None]]:
        """Batches and their weights, checked, on the model's device."""
        batches = track(self.batches.read(), total=self.batches.length, label=self.label)
        for index, pair in enumerate(batches):
            batch, weights = self.to_model(pair)
            check_batch_finite(batch, index, masks=self.allow_masks)
            yield batch, weights

    def first_batch(self) -> tuple[Any, Tensor | None]:
        """The first batch and its weights."""
        first = next(self.read(), None)
        if first is None:
            raise InputError("data is empty: it yields no batch. Pass at least one example.")
        return first

    def to_model(self, batch: Any) -> Any:
        """A batch on the model's device: that of its first trainable parameter."""
        device = next(p.device for p in self.model.parameters() if p.requires_grad)
        return move_batch(batch, device)

    def call(
        self,
        params: Params,
        function: Callable[[nn.Module, Noise | None], Value],
        *,
        draw: int | None = None,
        index: int = 0,
    ) -> Value:
        """The value of function(model, noise); a draw depends only on (seed, draw, batch)."""
        if self.training and draw is not None:
            seed_draw(self.seed, draw, index, self.devices)
        noise = Noise(self.seed, draw or 0, index) if self.paired else None
        return call_with_params(self.model, params, lambda model: function(model, noise))

    def batch_mean(
        self,
        params: Params,
        batch: Any,
        weights: Tensor | None,
        *,
        draw: int | None = None,
        index: int = 0,
        use: UseMean | None = None,
    ) -> BatchMean:
        """The mean loss of one batch, in one draw."""

        def read_mean(model: nn.Module, noise: Noise | None) -> BatchMean:
            batch_mean = self.loss.mean(model, batch, weights, noise)
            if use is not None:
                check_finite_loss(batch_mean.mean, index)
                use(batch_mean.mean, batch_mean.weight)
            return batch_mean

        return self.call(params, read_mean, draw=draw, index=index)

    def batch_gradient(
        self, params: Params, batch: Any, weights: Tensor | None
    ) -> Sequence[Tensor | None]:
        """The gradient of one batch's mean loss, in the first draw."""
        leaves = derivatives.leaves(params)
        gradients: list[Tensor | None] = []
        with self.prepared(training=self.training), torch.enable_grad():
            self.batch_mean(
                leaves,
                *self.to_model((batch, weights)),
                draw=0,
                use=lambda mean, _: gradients.extend(derivatives.gradient(mean, leaves)),
            )
        return gradients

    def select_draws(self, draws: Sequence[int] | None) -> Sequence[int]:
        """The draws to average: those given, or all."""
        return range(self.draws if self.training else 1) if draws is None else draws

    def run(
        self, params: Params, use: UseMean, *, draws: Sequence[int] | None = None
    ) -> PassResult:
        """One pass; `use` is called with every batch's mean loss and its share of the weight."""
        draws = self.select_draws(draws)
        total, weight, count, batch = 0.0, 0.0, 0, None
        with self.prepared(training=self.training):
            for index, (batch, weights) in enumerate(self.read()):
                batch_mean = BatchMean(torch.zeros(()), 0.0, 0)
                for draw in draws:
                    batch_mean = self.batch_mean(
                        params,
                        batch,
                        weights,
                        draw=draw,
                        index=index,
                        use=lambda mean, weight: use(mean, weight / len(draws)),
                    )
                    total += float(batch_mean.mean.detach()) * batch_mean.weight / len(draws)
                weight, count = weight + batch_mean.weight, count + batch_mean.size
        if not weight:
            raise InputError(
                f"the data gave {count} examples of total weight 0: tacit reads the data more than "
                "once. Pass data that can be read repeatedly, such as a list of batches, with "
                "weight above 0."
            )
        return PassResult(total / weight, weight, count, batch)

    def mean_vector(
        self,
        leaves: Params,
        vectors: Callable[[Tensor], Sequence[Tensor | None]],
        *,
        draws: Sequence[int] | None = None,
    ) -> tuple[PassResult, Params]:
        """One pass, and the weighted mean over batches of vectors(mean loss), in float64."""
        sums = float64_zeros(leaves)

        def add(mean: Tensor, weight: float) -> None:
            for total, vector in zip(sums.values(), vectors(mean), strict=True):
                if vector is not None:
                    total.add_(vector.to(total.device), alpha=weight)

        with torch.enable_grad():
            result = self.run(leaves, add, draws=draws)
        for total in sums.values():
            total.div_(result.weight)
        check_finite(sums, what="the derivative of the loss")
        return result, sums

    def repeats_order(self, *, shuffled: bool = True) -> bool:
        """Whether two passes begin with the same batch, as far as can be observed.

        Passes fork the random state, so a shuffled loader repeats its order. With shuffled=False
        the order must be the same under any random state, as labels beside the data require.
        """
        first_batches = []
        for seed in range(2):
            with self.prepared(training=False):
                if not shuffled:
                    seed_devices(seed, self.devices)
                    for generator in self.batches.generators:
                        generator.manual_seed(seed)
                batch, _ = self.first_batch()
            first_batches.append(list(tensors_in(batch)))
        first, second = first_batches
        return len(first) == len(second) and all(map(torch.equal, first, second))

    def predictions(
        self, points: Sequence[Params], *, has_outputs: bool
    ) -> tuple[list[Tensor], Any]:
        """Outputs at each point, in eval mode, and the last target; needs `has_outputs=True`."""
        outputs: list[list[Any]] = [[] for _ in points]
        target = None
        with self.prepared(training=False), torch.no_grad():
            for batch, _ in self.read():
                for params, outputs_here in zip(points, outputs, strict=True):
                    output = None
                    if has_outputs:
                        inputs, target = split_batch(batch)
                        output = self.call(params, lambda model, _, i=inputs: model(*i))
                    if not isinstance(output, Tensor):
                        raise InputError(
                            "predictions need model(*inputs) to be one tensor, from Objective("
                            "model, loss, data). Pass outputs=, a function from parameters to "
                            "predictions."
                        )
                    outputs_here.append(output)
        return [torch.cat(batch_outputs) for batch_outputs in outputs], target


def check_finite_loss(mean: Tensor, index: int) -> None:
    """Refuse a loss that is not a finite number."""
    if not torch.isfinite(mean):
        raise InputError(
            f"the loss is {float(mean.detach())} on batch {index} (counted from 0), with finite "
            "data and parameters: an overflow or a logarithm of zero is likely. Evaluate in a "
            "wider dtype, or from logits."
        )


def track(items: Iterable[Item], *, total: int | None, label: str) -> Iterator[Item]:
    """Yield the items, with a progress bar on terminals once they have taken a while."""
    if not sys.stderr.isatty():
        yield from items
        return
    start, bar, task, waiting = time.monotonic(), None, None, True
    try:
        for done, item in enumerate(items):
            if waiting and time.monotonic() - start > PATIENCE:
                bar, waiting = new_bar(), False
                task = None if bar is None else bar.add_task(label, total=total, completed=done)
            yield item
            if bar is not None and task is not None:
                bar.update(task, completed=done + 1)
    finally:
        if bar is not None:
            bar.stop()


def new_bar():
    """A started progress bar on the error stream, or None without rich; the caller stops it."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as TimeLeft
    except ImportError:  # rich comes with the extra `cli`
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar
