"""One pass over the data: every batch, in every draw, through a borrowed model."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import batches, derivatives
from tacit.objective.batches import Batches, BatchPair
from tacit.objective.borrowing import (
    Attributes,
    call_with_params,
    check_graph,
    forked_randomness,
    temporary_mode,
)
from tacit.objective.losses import (
    BatchMean,
    MeanLoss,
    Reader,
    check_finite_loss,
)
from tacit.objective.models import BatchNorm
from tacit.objective.params import (
    Params,
    Point,
    check_finite,
    read_numbers,
    same_buffers,
)
from tacit.objective.randomness import WHOLE, Noise, seed_draw
from tacit.objective.ranks import ALONE, Ranks
from tacit.objective.sums import VectorSum

Item = TypeVar("Item")
Value = TypeVar("Value")

PENDING = 32
"""Number of batches whose losses are read from the device together."""
PATIENCE = 2.0
"""Seconds before a progress bar is drawn, so that short passes print nothing."""

Derivative = Callable[[Tensor, Params], Sequence[Tensor | None]] | None
"""derivative(mean, leaves): of a batch's mean loss, one tensor per leaf; None for no derivative."""


Look = Callable[[Any, BatchMean], float | None]
"""look(batch, batch_mean): sees a batch before its derivative is taken. What it returns is the part
of the batch in the sum over processes, where these share the rows of parameters."""


Move = Callable[[Params, Noise], Params]
"""move(params, noise): where to evaluate, as a differentiable function of the parameters; its noise
is the same for all batches of a draw."""


class PassResult(NamedTuple):
    """The result of one pass: the mean loss, its derivative, and what was read."""

    value: float
    derivative: Params
    """In float64, unless the objective accumulates in float32; empty if none was asked for."""
    examples: int
    unreached: tuple[str, ...] = ()
    """Parameters without a derivative, that is, None, in every batch."""
    shares: tuple[int, ...] = ()
    """How many of the examples every process has."""


@dataclass(frozen=True, eq=False)
class Passes:
    """How to run passes over the data: the model, its loss, the batches and the randomness."""

    model: nn.Module
    loss: Reader
    batches: Batches
    label: str
    training: bool
    draws: int
    """Number of draws to average by default; 1 outside training."""
    seed: int
    paired: bool
    """Whether the loss takes its noise as an argument, mirrored in pairs of draws."""
    batch_norm: BatchNorm | None = None
    """Which statistics batch norm uses; None for a model without batch norm."""
    move: Move | None = None
    """Moves the parameters of every draw (noise on weights); None leaves them as they are."""
    pairs_share: bool = False
    """Whether draws 2j and 2j+1 have the same dropout masks: those of draw j without technique."""
    noise_seed: int | None = None
    """Seed of the noise, where it is not that of the draws."""
    redraws_data: bool = False
    """Whether the data is read anew for each draw, with its randomness seeded by (seed, draw)."""
    sums: torch.dtype = torch.float64
    """The dtype that gradients are summed in; other derivatives always are in float64."""
    attributes: Attributes | None = None
    """Those of the model's modules, where they are known already."""
    ranks: Ranks = ALONE
    """The processes that share the model, each with examples of its own."""
    spare: BatchPair | None = None
    """A batch that all processes have, for those without one of their own."""

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the model's parameters."""
        if self.attributes is not None:
            return self.attributes.devices
        return {p.device for p in self.model.parameters()}

    @contextmanager
    def prepared(self, *, training: bool) -> Iterator["Passes"]:
        """Set the model's mode and fork the random state; both are restored.

        Yields the same passes for many batches: they look at the model's attributes once.
        """
        forked = forked_randomness(self.devices, self.batches.generators)
        with forked, temporary_mode(self.model, training=training, batch_norm=self.batch_norm):
            attributes = Attributes(self.model)
            if attributes.shards and self.ranks.shards is None:
                raise InputError(
                    "the model was sharded after the objective was made, which has its examples in "
                    "one process: make the objective after fully_shard."
                )
            yield replace(self, attributes=attributes)

    def readings(self, draws: Sequence[int] | None = None) -> list[Sequence[int]]:
        """The draws that each reading of the data serves: all of them, or one each."""
        draws = range(self.draws) if draws is None else draws
        return [[draw] for draw in draws] if self.redraws_data else [draws]

    def read(self, draw: int = 0) -> Iterator[BatchPair]:
        """Batches and their weights, checked, on the model's device."""
        source = self.batches.read
        if self.redraws_data:
            numbers = (self.seed, draw // 2 if self.paired else draw)  # mirrored pairs share it
            source = partial(self.batches.redraw, numbers, self.devices)
        pairs = track(source(), total=self.batches.length, label=self.label)
        for index, pair in enumerate(pairs):
            batch, weights = self.to_model(pair)
            # Batches of any structure may hold -inf, in additive attention masks.
            batches.check_batch_finite(batch, index, masks=not isinstance(self.loss, MeanLoss))
            if batches.row_count(batch) != 0:
                yield batch, weights

    def read_in_step(self, draw: int) -> Iterator[tuple[int, BatchPair, bool]]:
        """Number (of all processes), batch and whether it counts; see `Ranks.in_step`."""
        pairs: Any = self.ranks.in_step(self.read(draw), self.spare)
        for index, (pair, counts) in enumerate(pairs):
            yield index * self.ranks.count + self.ranks.number, pair, counts

    def regroups(self) -> bool:
        """Whether the examples of the first batch depend on the draw."""
        with self.prepared(training=False):
            batches_of_draws = [self.first_batch(draw)[0] for draw in range(2)]
        return not batches.same(*batches_of_draws)

    def first_batch(self, draw: int = 0) -> BatchPair:
        """The first batch and its weights: of the first process that has one."""
        with self.ranks.agreeing():
            first = next(self.read(draw), None)
        first = self.ranks.first(first)
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
            number = draw // 2 if self.pairs_share else draw
            seed_draw(self.seed, number, index, self.devices)
        if self.batch_norm == "running" and not isinstance(params, Point):
            raise InputError(
                "a point came without its running statistics, which batch_norm='running' needs: "
                "pass what Objective.point returns."
            )
        seed = self.seed if self.noise_seed is None else self.noise_seed
        noise = Noise(seed, draw or 0, index) if self.paired else None
        if self.move is not None and draw is not None:
            params = same_buffers(self.move(params, Noise(seed, draw, WHOLE)), params)
        try:
            return call_with_params(
                self.model, params, lambda model: use(model, noise), self.attributes
            )
        except ValueError as error:  # a single image has statistics, a single row has none
            if "Expected more than 1" not in str(error):
                raise
            raise InputError(
                f"batch {index} (counted from 0) has one example, and batch norm has no statistics "
                f"of one ({error}): choose another batch_size, leave an example out, or pass a "
                "DataLoader with drop_last=True."
            ) from error

    def differentiate(
        self,
        params: Params,
        pair: BatchPair,
        derivative: Derivative,
        draw: int | None,
        index: int,
        look: Look | None = None,
    ) -> tuple[BatchMean, Sequence[Tensor | None]]:
        """The mean loss of one batch, in one draw, and its derivative; neither has a graph.

        Whether the loss is finite is left to the caller, because a look at it waits for the device.
        """
        leaves = derivatives.leaves(params)  # some losses differentiate in themselves
        return self._differentiate(leaves, pair, derivative, draw, index, look)

    def _differentiate(
        self,
        leaves: Params,
        pair: BatchPair,
        derivative: Derivative,
        draw: int | None,
        index: int,
        look: Look | None,
    ) -> tuple[BatchMean, Sequence[Tensor | None]]:
        """As `differentiate`, with leaves that are made already."""

        def read(model: nn.Module, noise: Noise | None):
            batch_mean = self.loss.mean(model, pair, noise)
            mean, part = batch_mean.mean, None if look is None else look(pair[0], batch_mean)
            if self.ranks.shards is not None:  # gradients are summed over processes
                mean = mean * (self.ranks.share if part is None else part)
            return batch_mean, () if derivative is None else derivative(mean, leaves)

        batch_mean, vectors = self.call(leaves, read, draw=draw, index=index)
        if derivative is not None and index == 0 and self._is_new_graph():
            check_graph(self.model, batch_mean.mean, leaves)
        batch_mean = BatchMean(batch_mean.mean.detach(), batch_mean.weight, batch_mean.size)
        return batch_mean, vectors

    def _is_new_graph(self) -> bool:
        """Whether no graph has been checked since the model's attributes were looked at."""
        if self.attributes is None:
            return True
        checked, self.attributes.graph_checked = self.attributes.graph_checked, True
        return not checked

    def batch_mean(self, params: Params, pair: BatchPair, draw: int | None = None) -> BatchMean:
        """The mean loss of one batch; refused if it is not finite."""
        batch_mean, _ = self.differentiate(params, pair, None, draw, 0)
        check_finite_loss(float(batch_mean.mean), 0)
        return batch_mean

    def batch_gradient(
        self, params: Params, pair: BatchPair, derivative: Derivative = derivatives.gradient
    ) -> Sequence[Tensor | None]:
        """The gradient, or another derivative, of one batch's mean loss, in the first draw."""
        with self.prepared(training=self.training), torch.enable_grad():
            pair = self.to_model(pair)
            batch_mean, vectors = self.differentiate(params, pair, derivative, 0, 0)
            check_finite_loss(float(batch_mean.mean), 0)
            return vectors

    def examples(
        self, params: Params, use: Callable[..., Value], pair: BatchPair, draw: int, index: int = 0
    ) -> tuple[Value, Tensor | None]:
        """use(examples of one batch, in one draw), with the parameters swapped in; the weights."""

        def read(model: nn.Module, noise: Noise | None) -> tuple[Value, Tensor | None]:
            examples = self.loss.examples(model, pair, noise)
            return use(examples), examples.weights

        return self.call(params, read, draw=draw, index=index)

    def run(
        self,
        params: Params,
        derivative: Derivative,
        draws: Sequence[int] | None,
        look: Look | None = None,
    ) -> PassResult:
        """One pass: the means over batches of the loss and of its derivative.

        `look` is called with every batch and its mean loss, in the first draw.
        """
        readings, leaves = self.readings(draws), derivatives.leaves(params)
        is_gradient = derivative is derivatives.gradient
        dtype = self.sums if is_gradient else torch.float64
        weighed = self.ranks.shards is not None
        sums = _Sums({} if derivative is None else params, dtype, weighed=weighed)
        take = sums.stream_gradient if is_gradient else derivative
        with (
            self.ranks.agreeing(after_models=True),
            self.prepared(training=self.training) as passes,
            torch.enable_grad(),
        ):
            for draws_here in readings:
                shares = len(draws_here) * len(readings)
                sums.examples = 0
                for index, pair, counts in passes.read_in_step(draws_here[0]):
                    size = 0
                    for draw in draws_here:
                        first_look = look if counts and draw == draws_here[0] else None
                        share = 1 / shares if counts else 0.0
                        start = partial(sums.start_batch, share=share, look=first_look)
                        (mean, _, size, *_), vectors = passes._differentiate(
                            leaves, pair, take, draw, index, start
                        )
                        sums.add_batch(index, mean, vectors)
                        del vectors  # the next backward pass needs the memory
                    sums.examples += size if counts else 0
            sums.read_losses()
        result = sums.over(self.ranks)
        check_finite(result.derivative, what="the derivative of the loss")
        return result


class _Sums:
    """Sums over batches of the loss and of its derivative, each times the weight of the batch."""

    def __init__(self, params: Params, dtype: torch.dtype, *, weighed: bool) -> None:
        self._vectors, self._names = VectorSum(params, dtype), tuple(params)
        self._weighed = weighed
        """Whether derivatives come with the weight of their batch: where they are summed over
        processes already, each of which has another batch."""
        self._large: list[str] | None = None
        """The leaves whose gradients are added one by one, once they are known."""
        self.examples = 0
        """The number of examples in this reading of the data."""
        self._value, self._total_weight = 0.0, 0.0
        self._weight = 0.0
        """The weight of the batch that is added now."""
        self._losses: dict[str, Tensor] = {}
        """By number, those of the last batches, which may still be computed on the device."""
        self._of_batches: list[tuple[int, float]] = []
        """The index of the batch and the weight of each of those losses."""

    def start_batch(self, batch: Any, mean: BatchMean, *, share: float, look: Look | None) -> float:
        """Note the weight of a batch in one of its draws, before its derivative is taken."""
        self._weight = mean.weight * share
        if look is not None:
            look(batch, mean)
        return self._weight

    def stream_gradient(self, mean: Tensor, leaves: Params) -> tuple[()]:
        """Add the gradient of a batch, tensor by tensor, as a `Derivative` that returns nothing."""
        if self._large is None:
            self._large = derivatives.large_leaves(leaves)
        add = partial(self._vectors.add, factor=self._factor)
        derivatives.stream_gradient(mean, leaves, add, large=self._large)
        return ()

    def add_batch(self, index: int, mean: Tensor, vectors: Sequence[Tensor | None]) -> None:
        """Add the loss of a batch, and its derivative if it was not streamed."""
        named = zip(self._names, vectors, strict=False)
        vector = {name: tensor for name, tensor in named if tensor is not None}
        if vector:
            self._vectors.add(vector, self._factor)
        self._losses[str(len(self._losses))] = mean
        self._of_batches.append((index, self._weight))
        self._total_weight += self._weight
        if len(self._losses) == PENDING:
            self.read_losses()

    @property
    def _factor(self) -> float:
        return 1.0 if self._weighed else self._weight

    def read_losses(self) -> None:
        """Add the losses of the last batches; refused if one of them is not finite."""
        losses = read_numbers(self._losses).values()
        for loss, (index, weight) in zip(losses, self._of_batches, strict=True):
            check_finite_loss(loss, index)
            self._value += loss * weight
        self._losses, self._of_batches = {}, []

    def over(self, ranks: Ranks) -> PassResult:
        """The means over the batches of all processes."""
        unreached = set(self._vectors.unreached)
        sums = ranks.gather((self._value, self._total_weight, self.examples, unreached))
        values, weights, examples, unreached = zip(*sums, strict=True)
        if not sum(weights):
            raise InputError(
                f"the data gave {sum(examples)} examples of total weight 0: tacit reads the data "
                "more than once. Pass data that can be read repeatedly, with weight above 0."
            )
        nowhere = tuple(n for n in self._names if all(n in names for names in unreached))
        self._vectors.sum_over_replicas(ranks)
        mean = self._vectors.divided(sum(weights))
        return PassResult(sum(values) / sum(weights), mean, sum(examples), nowhere, examples)


def move_by(shift: Params) -> Move:
    """The same constant move of the parameters in every draw."""
    return lambda params, _: {n: p + shift[n].to(p) for n, p in params.items()}


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
