"""One pass over the data: every batch, in every draw, through a borrowed model.

Before any gradient is trusted, data, model and loss are checked on a few examples, the probe.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import batches, derivatives
from tacit.objective.batches import Batches, BatchPair
from tacit.objective.borrowing import call_with_params, forked_randomness, temporary_mode
from tacit.objective.losses import BatchMean, ExampleLosses, MeanLoss, count_examples
from tacit.objective.params import Params, check_finite, coarsest_dtype, float64_zeros
from tacit.objective.randomness import Noise, seed_draw

Item = TypeVar("Item")
Value = TypeVar("Value")

PATIENCE = 2.0
"""Seconds before a progress bar is drawn, so that short passes print nothing."""
PROBE_EXAMPLES = 256
"""Number of examples in the probe, if batches can be sliced."""

Derivative = Callable[[Tensor, Params], Sequence[Tensor | None]] | None
"""derivative(mean, leaves): of a batch's mean loss, one tensor per leaf; None for no derivative."""


class PassResult(NamedTuple):
    """The result of one pass: the mean loss, its derivative, and what was read."""

    value: float
    derivative: Params
    """In float64; empty if none was asked for."""
    examples: int
    last_batch: Any


@dataclass(frozen=True, eq=False)
class Passes:
    """How to run passes over the data: the model, its loss, the batches and the randomness."""

    model: nn.Module
    loss: MeanLoss | ExampleLosses
    batches: Batches
    label: str
    training: bool
    draws: int
    """Number of draws to average by default; 1 outside training."""
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

    def read(self) -> Iterator[BatchPair]:
        """Batches and their weights, checked, on the model's device."""
        pairs = track(self.batches.read(), total=self.batches.length, label=self.label)
        for index, pair in enumerate(pairs):
            batch, weights = self.to_model(pair)
            # Batches of any structure may hold -inf, in additive attention masks.
            batches.check_batch_finite(batch, index, masks=isinstance(self.loss, ExampleLosses))
            yield batch, weights

    def first_batch(self) -> BatchPair:
        """The first batch and its weights."""
        first = next(self.read(), None)
        if first is None:
            raise InputError("data is empty: it yields no batch. Pass at least one example.")
        return first

    def to_model(self, batch: Value) -> Value:
        """A batch on the model's device: that of its first trainable parameter."""
        device = next(p.device for p in self.model.parameters() if p.requires_grad)
        return batches.map_tensors(batch, lambda tensor: tensor.to(device))

    def call(
        self, params: Params, use: Callable[..., Value], *, draw: int | None = None, index: int = 0
    ) -> Value:
        """The value of use(model, noise); a draw depends only on (seed, draw, batch)."""
        if self.training and draw is not None:
            seed_draw(self.seed, draw, index, self.devices)
        noise = Noise(self.seed, draw or 0, index) if self.paired else None
        return call_with_params(self.model, params, lambda model: use(model, noise))

    def differentiate(
        self, params: Params, pair: BatchPair, derivative: Derivative, draw: int | None, index: int
    ) -> tuple[BatchMean, Sequence[Tensor | None]]:
        """The mean loss of one batch, in one draw, and its derivative."""
        leaves = params if derivative is None else derivatives.leaves(params)

        def read(model: nn.Module, noise: Noise | None):
            batch_mean = self.loss.mean(model, pair, noise)
            return batch_mean, () if derivative is None else derivative(batch_mean.mean, leaves)

        return self.call(leaves, read, draw=draw, index=index)

    def batch_mean(self, params: Params, pair: BatchPair, draw: int | None = None) -> BatchMean:
        """The mean loss of one batch."""
        return self.differentiate(params, pair, None, draw, 0)[0]

    def batch_gradient(self, params: Params, pair: BatchPair) -> Sequence[Tensor | None]:
        """The gradient of one batch's mean loss, in the first draw."""
        with self.prepared(training=self.training), torch.enable_grad():
            pair = self.to_model(pair)
            batch_mean, gradient = self.differentiate(params, pair, derivatives.gradient, 0, 0)
        check_finite_loss(batch_mean.mean, 0)
        return gradient

    def examples(
        self, params: Params, use: Callable[..., Value], pair: BatchPair, draw: int, index: int = 0
    ) -> tuple[Value, Tensor | None]:
        """use(examples of one batch, in one draw), with the parameters swapped in; the weights."""

        def read(model: nn.Module, noise: Noise | None) -> tuple[Value, Tensor | None]:
            examples = self.loss.examples(model, pair, noise)
            return use(examples), examples.weights

        return self.call(params, read, draw=draw, index=index)

    def run(
        self, params: Params, derivative: Derivative, draws: Sequence[int] | None
    ) -> PassResult:
        """One pass: the means over batches of the loss and of its derivative."""
        draws = range(self.draws) if draws is None else draws
        sums = {} if derivative is None else float64_zeros(params)
        value, total_weight, count, batch = 0.0, 0.0, 0, None
        with self.prepared(training=self.training), torch.set_grad_enabled(derivative is not None):
            for index, pair in enumerate(self.read()):
                batch, weight, size = pair[0], 0.0, 0
                for draw in draws:
                    batch_mean, vectors = self.differentiate(params, pair, derivative, draw, index)
                    mean, weight, size = batch_mean
                    check_finite_loss(mean, index)
                    value += float(mean.detach()) * weight / len(draws)
                    _add(sums, vectors, weight / len(draws))
                    del vectors  # the next backward pass needs the memory
                total_weight, count = total_weight + weight, count + size
        if not total_weight:
            raise InputError(
                f"the data gave {count} examples of total weight 0: tacit reads the data more than "
                "once. Pass data that can be read repeatedly, with weight above 0."
            )
        for tensor in sums.values():
            tensor.div_(total_weight)
        check_finite(sums, what="the derivative of the loss")
        return PassResult(value / total_weight, sums, count, batch)

    def check(self, params: Params, data: Any) -> BatchPair:
        """Check data, model and loss on the probe, and return it.

        Refused are data that cannot be read repeatedly, a loss that is not deterministic and, if
        it should be one, a loss that is not a mean over examples.
        """
        with self.prepared(training=self.training), torch.no_grad():
            batches.check_rereadable(self.batches, data)
            probe = self._choose_probe()
            self._check_deterministic(params, probe)
        if isinstance(self.loss, MeanLoss):
            self.check_mean_loss(params, probe[0])
        return probe

    def _choose_probe(self) -> BatchPair:
        """Examples spread over the data where that is cheap, else the first of the first batch."""
        first = self.first_batch()
        sample = None if self.batches.sample is None else self.batches.sample(PROBE_EXAMPLES)
        if sample is not None:
            return self.to_model(sample)
        return first_examples(first) if isinstance(self.loss, MeanLoss) else first

    def _check_deterministic(self, params: Params, probe: BatchPair) -> None:
        """Refuse a model that gives two different losses for one batch."""
        try:
            first, second = (self.batch_mean(params, probe, 0).mean for _ in range(2))
        except RuntimeError as error:
            model_dtype = next(iter(params.values())).dtype
            data_dtypes = {t.dtype for t in batches.tensors_in(probe[0])} - {model_dtype}
            if "type" not in str(error) or not data_dtypes:
                raise
            raise InputError(
                f"the data is {', '.join(map(str, data_dtypes))} and the model is {model_dtype}: "
                f"cast one to the other, for instance with tensor.to({model_dtype})."
            ) from error
        if abs(first - second) > 10 * torch.finfo(first.dtype).eps * abs(first):
            cause = (
                "F.dropout or noise in forward; Objective(…, training=True, draws=…) averages it"
            )
            if self.training:
                cause = "randomness that torch's seed does not control, such as numpy's"
            raise InputError(
                f"the same batch gave two losses, {float(first)!r} and {float(second)!r}: the "
                f"objective is not deterministic. Likely cause: {cause}."
            )

    def check_mean_loss(self, params: Params, batch: Any) -> None:
        """Refuse a loss that is not a mean over the examples of this batch, in eval mode."""
        with self.prepared(training=False), torch.no_grad():
            whole = self.batch_mean(params, (batch, None))
            check_finite_loss(whole.mean, 0)
            again = self.batch_mean(params, (batch, None)) if self.training else whole
            if not again.mean.isclose(whole.mean):
                return  # noise that eval mode does not stop: halves cannot be compared

            def evaluate(part: slice) -> Tensor:
                examples = batches.slice_batch(batch, part, whole.size)
                return self.batch_mean(params, (examples, None)).mean

            precision = coarsest_dtype(whole.mean, *params.values())
            check_mean_reduced(evaluate, whole.size, precision=precision)

    def check_across_batches(self, params: Params, probe: BatchPair, last: Any) -> None:
        """Refuse class weights and padding that show only between batches that differ."""
        first, (last, _) = self.to_model(probe[0]), first_examples((last, None))
        mixed = batches.join_batches(first, last, (count_examples(first), count_examples(last)))
        if mixed is not None:
            self.check_mean_loss(params, mixed)

    def check_rows_are_examples(self, params: Params, probe: BatchPair) -> None:
        """Refuse outputs whose first dimension equals the batch size only by coincidence."""
        if isinstance(self.loss, MeanLoss) and (count := count_examples(probe[0])) > 1:
            half = batches.slice_batch(self.to_model(probe), slice(count // 2), count)
            with torch.no_grad():
                self.examples(params, lambda examples: None, half, draw=0)


def first_examples(pair: BatchPair) -> BatchPair:
    """The first examples of a batch (inputs, …, target)."""
    return batches.slice_batch(pair, slice(PROBE_EXAMPLES), count_examples(pair[0]))


def _add(sums: Params, vectors: Sequence[Tensor | None], weight: float) -> None:
    for total, vector in zip(sums.values(), vectors, strict=True):
        if vector is not None:
            total.add_(vector.to(total.device), alpha=weight)


def check_finite_loss(mean: Tensor, index: int) -> None:
    """Refuse a loss that is not a finite number."""
    if not torch.isfinite(mean):
        raise InputError(
            f"the loss is {float(mean.detach())} on batch {index} (counted from 0), with finite "
            "data and parameters: an overflow, or log 0? Use a wider dtype, or a loss from logits."
        )


def check_mean_reduced(
    evaluate: Callable[[slice], Tensor], count: int, *, precision: torch.dtype
) -> None:
    """Refuse a loss whose value on a batch is not the mean over its two halves.

    Only means over examples can be streamed and averaged exactly. Sums, class-weighted means and
    means over tokens without padding are not means over examples.
    """
    if count < 2:
        return
    middle = count // 2
    whole, head, tail = (
        float(evaluate(part).detach())
        for part in (slice(0, count), slice(0, middle), slice(middle, count))
    )
    mean = (middle * head + (count - middle) * tail) / count
    slack = torch.finfo(precision).eps ** 0.6 * max(abs(whole), abs(head), abs(tail))
    if abs(whole - mean) <= slack:
        return
    if abs(whole - (head + tail)) <= slack:
        raise InputError(
            f"the loss of a batch of {count} is the sum of its halves' losses ({whole:.6g}): it "
            "is sum-reduced. Pass a loss with reduction='mean'."
        )
    raise InputError(
        f"the loss of a batch of {count} is {whole:.6g}, the mean over its two halves {mean:.6g}: "
        "not a mean over examples. Likely causes: shapes that broadcast, as (n, 1) and (n,), class "
        "weights, ignored tokens, or examples that interact. Use Objective.from_batch_loss with "
        "one loss per example or token."
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
