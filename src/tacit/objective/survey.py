"""Whether the loss is a mean over examples, and which tokens it ignores.

The loss of a batch is compared with the losses of its parts. A difference may show only on examples
that are rare (a class with a weight of its own, padding), so such examples are collected from all
batches of the first pass and compared at its end.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.batches import join_batches, row_count, select_rows, tensors_in
from tacit.objective.losses import BatchMean, Outputs, check_finite_loss, count_examples
from tacit.objective.params import (
    Params,
    coarsest_dtype,
    perturb_last_digit,
    same_buffers,
    to_float64,
)

FIRST_CHECK, CHECK_EVERY = 96, 32
"""The batch of a pass that is compared with its parts first, and the distance to the next.

With the probe and the collected examples that is at most one batch in 32, and at least two.
"""
MAX_ROWS, MIN_ROWS, MAX_TARGETS = 64, 16, 2**12
"""Largest number of examples that are compared with their parts at once; of long sequences fewer,
down to the second number, so that about this many targets are."""
MAX_NEW_VALUES = 48
"""Number of new values of a tensor for which an example is collected."""
MIN_IGNORED = 0.01
"""Part of the tokens that the loss may ignore without a Problem."""
FREQUENT = 0.01
"""A new value that fills this part of a batch is collected in any case: padding is frequent."""
MIN_FREQUENT = 8
"""The least number of entries that a frequent value fills: most tokens of small batches are new."""
MAX_ENTRIES, MAX_WIDTH = 2**18, 64
"""Larger tensors (images) are not searched: entries of integers, entries per row of floats."""

MAX_OUTPUT = 2**24
"""Larger outputs (entries) are not copied to be compared with those of the first batch."""
COARSE = 0.02
"""Relative rounding of a gradient that is accepted below float64: autocast may be inside a loss."""
PART_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, InputError)
"""What a model or loss may raise for a part of a batch that is no batch."""

Gradient = Sequence[Tensor | None]
Evaluate = Callable[[Params, Any, bool], tuple[BatchMean, Gradient]]
"""evaluate(params, batch, differentiate): the mean loss of a batch, and on demand its gradient.

The gradient is empty where it is not asked for, or does not exist.
"""
NOT_A_MEAN = (
    "not a mean over examples. Likely causes: shapes that broadcast, as (n, 1) and (n,), class "
    "weights, ignored tokens, time before examples in the shapes, or examples that interact. Use "
    "Objective.from_batch_loss with one loss per example (or losses and weights, or "
    "interacting=True), or Objective.from_mean_loss with the number of tokens."
)


ONE_EACH = (
    "one loss per example is needed (reduction='none'). Where examples of a batch interact, as in "
    "contrastive learning, pass interacting=True; for a model that returns its mean loss use "
    "Objective.from_mean_loss(…, count=…)."
)


class Facts(NamedTuple):
    """What a pass showed about the examples; see the fields of the same names in `Source`."""

    ignored: float = 0.0
    uneven: bool = False
    tokens_known: bool = False
    """Whether ignored tokens were counted, which needs a gradient."""


class Survey:
    """What one pass shows: examples that may tell that the loss is no mean, and ignored tokens."""

    def __init__(self, *, count_tokens: bool):
        self.counts_tokens = count_tokens
        self.tokens = 0
        self.ignored = 0
        """Number of tokens on whose output the loss does not depend at this point."""
        self.with_ignored: Any = None
        """The first batch that holds such tokens."""
        self.row_sizes: set[float] = set()
        """Numbers of targets per row."""
        self.batches = 0
        self._last: Any = None
        """The last batch."""
        self.one_number, self.several_examples = True, False
        """Whether every batch has one loss, and whether some batch is not one example."""
        self._first: tuple[Any, Outputs, BatchMean] | None = None
        """Some examples of the first batch, their outputs and their mean loss."""
        self._suspect: Any = None
        """Examples whose loss seems to be no mean over them."""
        self._values: dict[int, Tensor] = {}
        """Values seen so far, by the position of the tensor in a batch; of floats the extremes."""
        self._rare: dict[Any, tuple[Any, int]] = {}
        """Examples with new values as a batch, and their number, by the shape of an example."""

    def see(self, batch: Any, batch_mean: BatchMean) -> None:
        """Look at a batch, before its gradient is computed."""
        tokens = batch_mean.tokens
        self.batches, self._last = self.batches + 1, batch
        self.one_number &= tokens is not None and tokens.are_one
        self.several_examples |= not _may_be_one(batch)
        if tokens is not None:
            self.row_sizes.add(tokens.per_row)
            if self.counts_tokens:
                tokens.when_known(lambda ignored: self._add_ignored(batch, ignored))
        if self._suspect is None and not self._compare_outputs(batch, batch_mean):
            self._collect(batch)

    def collected(self) -> list[Any]:
        """The examples that are to be compared with their parts, as batches; at least some."""
        rare = [examples for examples, _ in self._rare.values()]
        suspects = [] if self._suspect is None else [self._suspect]
        return [*suspects, *rare] or [spread_rows(self._last)]

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
                first = outputs.rows(slice(MAX_ROWS))
                self._first = (
                    select_rows(batch, torch.arange(first.count), count), first, first.mean()
                )  # fmt: skip
                cut = 3 * count // 8  # few examples of a class are never split as 3 to 5
                pieces = [outputs.rows(slice(cut)), outputs.rows(slice(cut, None))]
                whole, parts = here, [piece.mean() for piece in pieces if piece.count]
            else:
                examples, first, mean = self._first
                batch = join_batches(examples, batch)
                whole, parts = first.join(outputs).mean(), [mean, here]
        except PART_ERRORS:
            return False  # the loss differentiates, or two batches differ in their shapes
        precision = torch.finfo(coarsest_dtype(whole.mean)).eps ** 0.75
        if count > 1 and _complaint(whole, parts, 0.0, precision, count):
            self._suspect = batch
        return True

    def _collect(self, batch: Any) -> None:
        """Keep the examples of a batch with new values, and the very first ones."""
        if (count := row_count(batch) or 0) < 2:
            return
        tensors = list(tensors_in(batch))
        rows = [torch.arange(0 if self._rare else min(count, 4))]
        for position, tensor in enumerate(tensors):
            if tensor.ndim and tensor.numel():
                rows.append(self._new_rows(position, tensor))
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

    def _add_ignored(self, batch: Any, ignored: Tensor) -> None:
        number = int(ignored.sum())
        self.tokens, self.ignored = self.tokens + ignored.numel(), self.ignored + number
        if number and self.with_ignored is None:
            self.with_ignored = batch

    def _new_rows(self, position: int, tensor: Tensor) -> Tensor:
        """One row for each new value of a tensor: the extremes, frequent ones, and a few others."""
        rows = tensor.detach().reshape(len(tensor), -1)
        if tensor.is_floating_point() and rows.shape[1] <= MAX_WIDTH:
            values, entries = _extremes(rows)
            frequent = torch.zeros_like(values, dtype=torch.bool)
        elif not (tensor.is_floating_point() or tensor.is_complex()) and rows.numel() < MAX_ENTRIES:
            values, entries, counts = _distinct(rows)
            frequent = counts >= max(MIN_FREQUENT, FREQUENT * rows.numel())
        else:
            return torch.empty(0, dtype=torch.long)
        seen = self._values.get(position, values[:0])
        new = ~torch.isin(values, seen)
        low, high = torch.cat([seen, values]).aminmax()
        chosen = new & (frequent | (values == low) | (values == high))
        if not tensor.is_floating_point():
            others = (new & ~chosen).nonzero().flatten()
            chosen[others[: max(0, MAX_NEW_VALUES - len(seen))]] = True
        self._values[position] = torch.cat([seen, values[new]])
        return entries[chosen].cpu() // rows.shape[1]


def rows_of_values(tensor: Tensor, most: int = 512) -> Tensor:
    """One row for each distinct value of integers (at most so many); of floats, of the extremes."""
    rows = tensor.detach().reshape(len(tensor), -1)
    _, entries, *_ = _extremes(rows) if tensor.is_floating_point() else _distinct(rows)
    return entries[:most].cpu() // rows.shape[1]


def most_rows(batch: Any) -> int:
    """How many examples of a batch are compared with their parts, by the size of its last tensor.

    That is the target, where a batch has one; checks stay cheap beside a pass over the data.
    """
    *_, last = (t for t in (torch.zeros(1), *tensors_in(batch)) if t.ndim and t.numel())
    return max(MIN_ROWS, min(MAX_ROWS, MAX_TARGETS * len(last) // last.numel()))


def spread_rows(batch: Any, count: int | None = None) -> Any:
    """At most `most_rows` examples of a batch, spread over it."""
    count, most = count or row_count(batch), most_rows(batch)
    if count is None or count <= most:
        return batch
    return select_rows(batch, torch.linspace(0, count - 1, most).long(), count)


def _may_be_one(batch: Any) -> bool:
    """Whether a batch may hold one example, as far as can be seen."""
    if isinstance(batch, list) and all(isinstance(e, Mapping | list | tuple) for e in batch):
        return len(batch) == 1  # a list of examples
    return row_count(batch) == 1 or any(len(t) == 1 for t in tensors_in(batch) if t.ndim)


def is_due(index: int) -> bool:
    """Whether the batch with this number is compared with its parts."""
    return index >= FIRST_CHECK and index % CHECK_EVERY == 0


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


def random_points(params: Params, number: int = 8) -> Iterator[Params]:
    """Random weights of the same sizes as those of the model, each point with its negative."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        point = {}
        for name, p in params.items():
            normal = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            point[name] = normal * p.detach().square().mean().sqrt()
        yield same_buffers(point, params)
        yield same_buffers({name: -p for name, p in point.items()}, params)


def check_mean_loss(
    evaluate: Evaluate,
    params: Params,
    batch: Any,
    *,
    by_row: bool,
    repeatable: bool = True,
    collected: bool = False,
) -> None:
    """Refuse a loss whose value on a batch is not the mean over the parts of the batch.

    Only means over examples can be streamed and averaged exactly. Sums, class-weighted means, means
    over tokens without padding and losses of examples that interact are not means over examples.

    Args:
        evaluate: the mean loss of a batch at a point, and its gradient.
        params: the point.
        batch: examples; of a batch of the data at most `most_rows` are compared.
        by_row: whether the batch is (inputs, …, target) with one row per example; batches of any
            other structure are not checked where they cannot be cut into parts.
        repeatable: whether the loss of a batch is known to be the same each time.
        collected: whether the examples are from several batches: all of them are compared, unless
            they cannot be evaluated as one batch.
    """
    count = count_examples(batch) if by_row else row_count(batch)
    if count is None or count < 2:
        return
    if not collected:
        batch, count = spread_rows(batch, count), min(count, most_rows(batch))
    try:
        parts = _Parts(evaluate, params, batch, count, collected=collected)
        complaint = parts.compare(repeatable=repeatable)
    except _PartError as error:
        if by_row and not collected and count > 3:  # squeeze() removes the only row of a part
            raise InputError(
                f"the loss of a part of a batch of {count} cannot be computed ({error}), so that "
                "it is not known to be a mean over examples. Every tensor needs one row per "
                "example; for other batches use Objective.from_batch_loss."
            ) from error
        return
    second = row_count(batch, 1) if complaint and not by_row else None
    if complaint and not (second and _splits_along(evaluate, params, batch, second)):
        raise InputError(complaint)


def _splits_along(evaluate: Evaluate, params: Params, batch: Any, count: int) -> bool:
    """Whether the examples of a batch lie along the second dimension, after that of time."""
    try:
        return count > 1 and not _Parts(evaluate, params, batch, count, dim=1).compare()
    except _PartError:
        return False


class _PartError(Exception):
    """Model or loss cannot be evaluated on a part of a batch."""


@dataclass(frozen=True, eq=False)
class _Parts:
    """A batch that can be cut into parts along one dimension of its tensors."""

    evaluate: Evaluate
    params: Params
    batch: Any
    count: int
    dim: int = 0
    collected: bool = False

    def compare(self, *, repeatable: bool = True) -> str | None:
        """What is wrong with the loss, if anything.

        A part is evaluated by other routes than the batch, with other rounding. How much that
        matters is measured: every weight is moved a little, by `rounding_levels`.
        """
        everything = torch.arange(self.count)
        whole, gradient = self._evaluate(everything, self.params, differentiate=True)
        check_finite_loss(whole.mean, 0)
        if not repeatable and not self._mean(everything, self.params).mean.isclose(whole.mean):
            return None  # noise that eval mode does not stop: parts cannot be compared
        precision, level = rounding_levels(whole.mean, list(self.params.values()))
        moved = perturb_last_digit(self.params, level)
        moved_whole, moved_gradient = self._evaluate(everything, moved, differentiate=True)
        gradient_change = _norm(_subtract(moved_gradient, gradient))
        changes = [abs(float(moved_whole.mean - whole.mean))]
        del moved_gradient
        *splits, last = _splits(everything, self._order_by_target())
        for number, rows in enumerate(splits):
            parts = [self._mean(part, self.params) for part in rows]
            if number == 0:
                pairs = zip(parts, [self._mean(part, moved) for part in rows], strict=True)
                changes += [abs(float(a.mean - b.mean)) for a, b in pairs]
            if complaint := _complaint(whole, parts, 2 * max(changes), precision, self.count):
                return complaint
        both = [self._evaluate(part, self.params, differentiate=True) for part in last]
        parts, gradients = zip(*both, strict=True)
        complaint = _complaint(whole, parts, 2 * max(changes), precision, self.count)
        weights = [part.weight / (whole.weight or 1.0) for part in parts]
        coarse = any(p.dtype != torch.float64 for p in self.params.values())
        relative = max(4 * precision, COARSE if coarse else 0.0)
        return complaint or _gradient_complaint(
            gradient, gradients, weights, 4 * gradient_change, relative, self.count
        )

    def _mean(self, rows: Tensor, params: Params) -> BatchMean:
        return self._evaluate(rows, params)[0]

    def _evaluate(
        self, rows: Tensor, params: Params, *, differentiate: bool = False
    ) -> tuple[BatchMean, Gradient]:
        part = select_rows(self.batch, rows, self.count, self.dim)
        try:
            batch_mean, gradient = self.evaluate(params, part, differentiate)
        except PART_ERRORS as error:
            is_batch = len(rows) == self.count and not self.collected
            if is_batch or isinstance(error, torch.OutOfMemoryError):
                raise
            raise _PartError(str(error)) from error
        return batch_mean._replace(mean=batch_mean.mean.detach()), gradient

    def _order_by_target(self) -> Tensor | None:
        """The rows, sorted by the sums of the last tensor that has them."""
        dim, tensors = self.dim, list(tensors_in(self.batch))
        tensors = [t for t in tensors if t.ndim > dim and t.shape[dim] == self.count]
        if not tensors or tensors[-1].is_complex():
            return None
        last = tensors[-1].detach().movedim(dim, 0).reshape(self.count, -1)
        return last.double().sum(1).argsort().cpu()


def rounding_levels(mean: Tensor, params: Sequence[Tensor]) -> tuple[float, float]:
    """The relative rounding between a batch and its parts: of a loss, and of the weights.

    Both are above the last digit: products and convolutions of other sizes take other routes.
    """
    eps = torch.finfo(coarsest_dtype(mean, *params)).eps
    single = [p for p in params if p.is_cuda and p.dtype == torch.float32]
    products = torch.backends.cuda.matmul.allow_tf32 and any(p.ndim > 1 for p in single)
    convolutions = torch.backends.cudnn.allow_tf32 and any(p.ndim > 2 for p in single)
    if products or convolutions:
        eps = torch.finfo(torch.float16).eps  # it has as many digits as TF32
        return eps, eps
    return eps**0.75, min(8 * eps, eps**0.75)


def _splits(rows: Tensor, order: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Several ways to cut the rows of a batch in two; within a part their order stays."""
    middle = len(rows) // 2
    cuts = {middle, max(min(2, middle), len(rows) // 8)}
    yield from ((rows[:cut], rows[cut:]) for cut in sorted(cuts, reverse=True))
    if order is not None:
        yield order[:middle].sort().values, order[middle:].sort().values


def _complaint(
    whole: BatchMean, parts: Sequence[BatchMean], slack: float, precision: float, count: int
) -> str | None:
    """What is wrong with the mean of a batch, given those of its parts, if anything."""
    means = [float(part.mean) for part in parts]
    value, weight = float(whole.mean), sum(part.weight for part in parts)
    if all(part.size == part.weight == 1 for part in (whole, *parts)):
        return f"batch_loss returns one number for a batch of {count}, and for a part: {ONE_EACH}"
    if abs(whole.weight - weight) > 1e-6 * max(abs(whole.weight), abs(weight)):
        return (
            f"a batch of {count} has {whole.weight:g} losses (tokens, weights), its two parts have "
            f"{weight:g} together: every example must count by itself. Return one loss per example "
            "or token, and count those behind the mean."
        )
    # Half precision adds up the losses of a batch with large errors.
    half = whole.mean.dtype.itemsize < 4
    relative = torch.finfo(whole.mean.dtype).eps ** 0.5 if half else precision
    slack += relative * max(map(abs, (value, *means)))
    terms = [part.weight * mean for part, mean in zip(parts, means, strict=True) if part.weight]
    mean = sum(terms) / (weight or 1.0)
    if abs(value - mean) <= slack:
        return None
    if abs(value - sum(means)) <= slack:
        return (
            f"the loss of a batch of {count} is the sum of its parts' losses ({value:.6g}): it "
            "is sum-reduced. Pass a loss with reduction='mean'."
        )
    return (
        f"the loss of a batch of {count} is {value:.6g}, the mean over its two parts {mean:.6g}: "
        f"{NOT_A_MEAN}"
    )


def _gradient_complaint(
    whole: Gradient,
    parts: Sequence[Gradient],
    weights: Sequence[float],
    slack: float,
    relative: float,
    count: int,
) -> str | None:
    """What is wrong with the gradient: it may be no mean although the loss is one at this point."""
    sizes, rest = [_norm(whole)], whole
    for part, weight in zip(parts, weights, strict=True):
        if weight:
            sizes.append(_norm(part))
            rest = _subtract(rest, part, weight)
    difference = _norm(rest)
    if difference <= slack + relative * max(sizes) or not math.isfinite(difference):
        return None  # a gradient that is not finite is refused when it is used
    return (
        f"the gradient of a batch of {count} differs from the mean over those of its two parts by "
        f"{difference:.2g}, and its norm is {sizes[0]:.2g}: {NOT_A_MEAN}"
    )


def _norm(gradient: Gradient) -> float:
    return math.hypot(*(float(to_float64(g).norm()) for g in gradient if g is not None))


def _subtract(a: Gradient, b: Gradient, factor: float = 1.0) -> Gradient:
    """The tensors a − factor·b, where None is zero."""
    pairs = zip(a, b, strict=True)
    return [x if y is None else -factor * y if x is None else x - factor * y for x, y in pairs]
