"""What the first pass over the data shows: whether the loss is a mean, and which tokens it ignores.

A difference between the loss of a batch and those of its parts may show only on examples that are
rare (a class with a weight of its own, padding). Where the loss is one of outputs and targets, it
is computed again from the outputs of every batch. Otherwise rare examples are collected, and
compared with their parts at the end of the pass.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.batches import join_batches, row_count, select_rows, tensors_in
from tacit.objective.checks import check_mean_loss
from tacit.objective.losses import BatchMean, Outputs, broadcasts_refused
from tacit.objective.params import Params, coarsest_dtype, read_numbers, same_buffers
from tacit.objective.parts import (
    MAX_ROWS,
    ONE_EACH,
    PART_ERRORS,
    find_complaint,
    most_rows,
    spread_rows,
)
from tacit.objective.passes import Passes
from tacit.objective.randomness import Noise

FIRST_CHECK = 64
"""The first batch that is kept, to be compared with its parts, and then every power of two.

With the probe and the collected examples that is at most one batch in 32, and at least two.
"""
MAX_OUTPUT = 2**24
"""Larger outputs (entries) are not copied to be compared with those of the first batch."""
MAX_NEW_VALUES = 48
"""Number of new values of a tensor for which an example is collected."""
MAX_VALUES = 2**12
"""Values of a tensor that are remembered; of later ones only those that an example was kept for."""
FREQUENT, MIN_FREQUENT = 0.01, 8
"""A new value that fills this part of a batch, and as many entries, is collected in any case:
padding is frequent."""
MAX_ENTRIES, MAX_WIDTH = 2**18, 64
"""Larger tensors (images) are not searched: entries of integers, entries per row of floats."""
MIN_IGNORED = 0.01
"""Part of the tokens that the loss may ignore without a Problem."""


class Facts(NamedTuple):
    """What a pass showed about the examples; see the fields of the same names in `Source`."""

    ignored: float = 0.0
    uneven: bool = False
    tokens_known: bool = False
    """Whether ignored tokens were counted, which needs a gradient."""


class Survey:
    """What one pass shows: `see` looks at every batch, and `finish` checks what was collected."""

    def __init__(self, *, count_tokens: bool):
        self._count_tokens = count_tokens
        self._tokens = 0
        self._ignored: dict[str, Tensor] = {}
        """By batch, the number of tokens on whose output the loss does not depend at this point.
        They are read at the end, so that no batch waits for the device."""
        self._row_sizes: set[float] = set()
        """Numbers of targets per row."""
        self._batches, self._last = 0, None
        """Number of batches, and the last one."""
        self._one_number, self._several_examples = True, False
        """Whether every batch has one loss, and whether some batch is not one example."""
        self._first: tuple[Any, Outputs, BatchMean] | None = None
        """Some examples of the first batch, their outputs and their mean loss."""
        self._suspect: Any = None
        """Examples whose loss seems to be no mean over them."""
        self._samples: list[Any] = []
        """Some examples of a few batches, each as a batch."""
        self._waiting: tuple[Any, _Copies] | None = None
        """The last batch, whose values are still to be searched."""
        self._values: dict[int, Tensor] = {}
        """Values seen so far in ascending order, by the position of the tensor in a batch; of
        floats the extremes."""
        self._rare: dict[Any, tuple[Any, int]] = {}
        """Examples with new values as a batch, and their number, by the shape of an example."""

    @property
    def batches(self) -> int:
        """The number of batches that were looked at."""
        return self._batches

    def __getstate__(self) -> dict[str, Any]:
        """What `finish` needs, for other processes."""
        self._collect_waiting()
        return {**vars(self), "_first": None}

    def see(self, batch: Any, batch_mean: BatchMean) -> None:
        """Look at a batch, before its gradient is computed."""
        tokens, number = batch_mean.tokens, self._batches
        self._batches, self._last = number + 1, batch
        self._one_number &= tokens is not None and tokens.are_one
        self._several_examples |= not _may_be_one(batch)
        if tokens is not None:
            self._row_sizes.add(tokens.per_row)
            if self._count_tokens:
                tokens.when_known(lambda ignored: self._add_ignored(number, ignored))
        if number >= FIRST_CHECK and number.bit_count() == 1:
            self._samples.append(spread_rows(batch, row_count(batch)))
        if self._suspect is None and not self._compare_outputs(batch, batch_mean):
            self._collect_waiting()
            self._waiting = batch, _Copies(batch)

    def _add_ignored(self, number: int, ignored: Tensor) -> None:
        self._tokens += ignored.numel()
        self._ignored[str(number)] = ignored.sum()

    def _compare_outputs(self, batch: Any, batch_mean: BatchMean) -> bool:
        """Whether the loss could be computed from outputs, to see if it is a mean over examples.

        The model is not run, so that every batch is looked at, joined with the first one: in one of
        them is the rarest of classes, or the only padding.
        """
        outputs, count = batch_mean.outputs, batch_mean.size
        if outputs is None or sum(t.numel() for t in tensors_in(outputs.output)) > MAX_OUTPUT:
            return False
        here = BatchMean(batch_mean.mean.detach(), count, count)
        try:
            if self._first is None:
                rows = torch.arange(min(count, MAX_ROWS))
                first = _select(outputs, rows, count)
                self._first = select_rows(batch, rows, count), first, _mean_of(first, len(rows))
                # A few examples of a class are never split as 3 to 5.
                halves = torch.arange(count).split([3 * count // 8, count - 3 * count // 8])
                parts = [_mean_of(_select(outputs, r, count), len(r)) for r in halves if len(r)]
                whole, others = here, None
            else:
                others, first, mean = self._first
                output, target = join_batches(first[:2], outputs[:2])
                joined = Outputs(output, target, outputs.loss)
                whole, parts = _mean_of(joined, mean.size + count), [mean, here]
            precision = torch.finfo(coarsest_dtype(whole.mean)).eps ** 0.75
            if count > 1 and find_complaint(whole, parts, 0.0, precision, count):
                self._suspect = batch if others is None else join_batches(others, batch)
        except PART_ERRORS:
            return False  # the loss differentiates, or two batches differ in their shapes
        return True

    def _collect_waiting(self) -> None:
        """Keep the examples of the last batch with new values, and the very first ones.

        One batch later a device has copied them, and goes on computing while they are searched.
        """
        if self._waiting is None:
            return
        batch, copies = self._waiting
        self._waiting = None
        if (count := row_count(batch) or 0) < 2:
            return
        tensors = list(tensors_in(batch))
        rows = [torch.arange(0 if self._rare else min(count, 4))]
        for position, values in copies.read().items():
            rows.append(self._new_rows(position, values))
        shapes = tuple((t.dtype, t.shape[1:]) for t in tensors)
        earlier, size = self._rare.get(shapes, (None, 0))
        chosen, most = torch.cat(rows).unique(), most_rows(batch)
        if len(chosen):
            examples = select_rows(batch, chosen, count)
            examples = examples if earlier is None else join_batches(earlier, examples)
            size += len(chosen)
            if size > most:  # the latest ones are the rarest
                examples = select_rows(examples, torch.arange(size - most, size), size)
            self._rare[shapes] = (examples, min(size, most))

    def _new_rows(self, position: int, tensor: Tensor) -> Tensor:
        """One row for each new value of a tensor: the extremes, frequent ones, and a few others."""
        rows = tensor.reshape(len(tensor), -1)
        if tensor.is_floating_point():
            values, entries = _extremes(rows)
            frequent = torch.zeros_like(values, dtype=torch.bool)
        else:
            values, entries, counts = _distinct(rows)
            frequent = counts >= max(MIN_FREQUENT, FREQUENT * rows.numel())
        seen = self._values.get(position, values[:0])
        places = torch.searchsorted(seen, values).clamp_max(max(len(seen) - 1, 0))
        new = seen[places] != values if len(seen) else torch.ones_like(frequent)
        low, high = torch.cat([seen[:1], seen[-1:], values]).aminmax()
        chosen = new & (frequent | (values == low) | (values == high))
        if not tensor.is_floating_point():
            others = (new & ~chosen).nonzero().flatten()
            chosen[others[: max(0, MAX_NEW_VALUES - len(seen))]] = True
        added = values[new if len(seen) < MAX_VALUES else chosen]
        if len(added):
            self._values[position] = torch.cat([seen, added]).sort().values
        return entries[chosen] // rows.shape[1]

    def finish(self, passes: Passes, params: Params) -> Facts:
        """Check the examples that the pass collected; return the facts that it showed."""
        self._collect_waiting()
        if self._one_number and self._several_examples and self._batches > 1:
            raise InputError(f"batch_loss returns one number for every batch: {ONE_EACH}")
        suspects = [] if self._suspect is None else [self._suspect]
        collected = [*suspects, *(examples for examples, _ in self._rare.values())]
        check = partial(check_mean_loss, passes, params, gradients=False)
        for examples in collected:
            check(passes.to_model(examples), collected=True)
        for batch in [*self._samples, *([] if collected else [self._last])]:
            check(passes.to_model(batch))
        counts = {int(n): int(count) for n, count in read_numbers(self._ignored).items()}
        ignored = sum(counts.values()) / max(self._tokens, 1)
        if ignored > MIN_IGNORED:
            # A loss may be flat at this point (a margin that is kept), but not at all points.
            first = min(number for number, count in counts.items() if count)
            with passes.prepared(training=False) as passes, torch.enable_grad():
                pair = passes.ranks.first(next(islice(passes.read(), first, None), None))
                batch, _ = pair or passes.first_batch()
                here, *elsewhere = (
                    _ignored_tokens(passes, point, batch)
                    for point in (params, *_random_points(params))
                )
            always = torch.stack([here, *elsewhere]).all(0)
            ignored *= float(always.sum()) / max(1, int(here.sum()))
        return Facts(ignored, len(self._row_sizes) > 1, self._count_tokens)


class _Copies:
    """Copies on the CPU of the tensors of a batch that are searched, by position.

    A GPU is not waited for before they are read.
    """

    def __init__(self, batch: Any) -> None:
        searched = {i: t.detach() for i, t in enumerate(tensors_in(batch)) if _is_searched(t)}
        self._copies = {i: t if t.is_cuda else t.cpu() for i, t in searched.items()}
        self._events: list[Any] = []
        for position, tensor in self._copies.items():
            if tensor.is_cuda:
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._copies[position] = pinned.copy_(tensor, non_blocking=True)
                self._events.append(torch.cuda.current_stream(tensor.device).record_event())

    def read(self) -> dict[int, Tensor]:
        """The copies, once they are complete."""
        for event in self._events:
            event.synchronize()
        return self._copies


def _is_searched(tensor: Tensor) -> bool:
    """Whether a tensor is small enough to be searched; images are not."""
    if not tensor.ndim or not tensor.numel() or tensor.is_complex():
        return False
    if tensor.is_floating_point():
        return tensor.numel() // len(tensor) <= MAX_WIDTH
    return tensor.numel() < MAX_ENTRIES


def rows_of_values(tensor: Tensor, most: int = 512) -> Tensor:
    """One row for each distinct value of integers (at most so many); of floats, of the extremes."""
    rows = tensor.detach().reshape(len(tensor), -1)
    _, entries, *_ = _extremes(rows) if tensor.is_floating_point() else _distinct(rows)
    return entries[:most].cpu() // rows.shape[1]


def _select(outputs: Outputs, rows: Tensor, count: int) -> Outputs:
    output, target = select_rows(outputs[:2], rows, count)
    return Outputs(output, target, outputs.loss)


def _mean_of(outputs: Outputs, count: int) -> BatchMean:
    with torch.no_grad(), broadcasts_refused(count):
        return BatchMean(outputs.loss(outputs.output, outputs.target), count, count)


def _may_be_one(batch: Any) -> bool:
    """Whether a batch may hold one example, as far as can be seen."""
    if isinstance(batch, list) and all(isinstance(e, Mapping | list | tuple) for e in batch):
        return len(batch) == 1  # a list of examples
    return any(len(t) == 1 for t in tensors_in(batch) if t.ndim) or row_count(batch) == 1


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct values, the first entry that holds each, and how often it occurs."""
    values, inverse, counts = rows.long().unique(return_inverse=True, return_counts=True)
    numbers = torch.arange(rows.numel(), device=rows.device)
    entries = torch.full_like(counts, rows.numel())
    return values, entries.scatter_reduce_(0, inverse.flatten(), numbers, "amin"), counts


def _extremes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value, and the entries that hold them."""
    flat = rows.flatten()
    entries = torch.stack([flat.argmin(), flat.argmax()])
    return flat[entries], entries


def _ignored_tokens(passes: Passes, params: Params, batch: Any) -> Tensor:
    """Which tokens of a batch the loss does not depend on, as a mask."""
    masks: list[Tensor] = []

    def read(model: nn.Module, noise: Noise | None) -> None:
        batch_mean = passes.loss.mean(model, (batch, None), noise)
        tokens = batch_mean.tokens
        if tokens is not None:
            tokens.when_known(masks.append)
            if not masks and tokens.values is not None:
                torch.autograd.grad(batch_mean.mean, tokens.values)

    passes.call(derivatives.leaves(params), read)
    return masks[0] if masks else torch.zeros(0, dtype=torch.bool)


def _random_points(params: Params, number: int = 8) -> Iterator[Params]:
    """Random weights of the same sizes as those of the model, each point with its negative."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        point = {}
        for name, p in params.items():
            normal = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            point[name] = normal * p.detach().square().mean().sqrt()
        yield same_buffers(point, params)
        yield same_buffers({name: -p for name, p in point.items()}, params)
