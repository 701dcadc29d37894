"""Whether a loss is the mean over the parts of a batch: only that can be streamed exactly."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.batches import row_count, select_rows, tensors_in
from tacit.objective.losses import BatchMean, check_finite_loss, count_examples
from tacit.objective.params import (
    Params,
    add_scaled,
    coarsest_dtype,
    norm,
    perturb_last_digit,
    square_norms,
)

MAX_ROWS, MIN_ROWS, MAX_TARGETS = 64, 4, 2**10
"""Largest number of examples that are compared with their parts at once; of long sequences fewer,
down to the second number, so that about this many targets are."""
COARSE = 0.02
"""Relative rounding of a gradient that is accepted below float64: autocast may be inside a loss."""
PART_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AssertionError, InputError)
"""What a model or loss may raise for a part of a batch that is no batch."""

Derive = Callable[[BatchMean, Params], None]
"""derive(batch_mean, leaves): called while the mean loss of a batch has its graph."""
Evaluate = Callable[[Params, Any, Derive | None], BatchMean]
"""evaluate(params, batch, derive): the mean loss of a batch, without a graph."""
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


def check_parts(
    evaluate: Evaluate,
    params: Params,
    batch: Any,
    *,
    by_row: bool,
    repeatable: bool = True,
    collected: bool = False,
    gradients: bool = True,
) -> None:
    """Refuse a loss whose value on a batch is not the mean over the parts of the batch.

    So it is with sums, class-weighted means, means over tokens without padding, and losses of
    examples that interact.

    Args:
        evaluate: the mean loss of a batch at a point.
        params: the point.
        batch: examples; of a batch of the data at most `most_rows` are compared.
        by_row: whether the batch is (inputs, …, target) with one row per example; batches of any
            other structure are not checked where they cannot be cut into parts.
        repeatable: whether the loss of a batch is known to be the same each time.
        collected: whether the examples are from several batches: all of them are compared, unless
            they cannot be evaluated as one batch.
        gradients: whether the gradient is compared too. It may differ where values do not.
    """
    count = count_examples(batch) if by_row else row_count(batch)
    if count is None or count < 2:
        return
    if not collected:
        batch, count = spread_rows(batch, count), min(count, most_rows(batch))
    try:
        parts = _Parts(evaluate, params, batch, count, collected=collected)
        complaint = parts.compare(repeatable=repeatable, gradients=gradients)
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


def most_rows(batch: Any, fewest: int = MIN_ROWS) -> int:
    """How many examples of a batch are compared with their parts, by the size of its last tensor.

    That is the target, where a batch has one; checks stay cheap beside a pass over the data.
    """
    *_, last = (t for t in (torch.zeros(1), *tensors_in(batch)) if t.ndim and t.numel())
    return max(fewest, min(MAX_ROWS, MAX_TARGETS * len(last) // last.numel()))


def spread_rows(batch: Any, count: int | None, fewest: int = MIN_ROWS) -> Any:
    """At most `most_rows` examples of a batch, spread over it."""
    most = most_rows(batch, fewest)
    if count is None or count <= most:
        return batch
    return select_rows(batch, torch.linspace(0, count - 1, most).long(), count)


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

    def compare(self, *, repeatable: bool = True, gradients: bool = True) -> str | None:
        """What is wrong with the loss, if anything."""
        everything, gradient = torch.arange(self.count), _Remainder(wanted=gradients)
        order = self._order_by_target()
        whole = self._evaluate(everything, gradient.derive)
        if not repeatable and not self._evaluate(everything).mean.isclose(whole.mean):
            return None  # noise that eval mode does not stop: parts cannot be compared
        *splits, last = _splits(everything, order)
        means = [[self._evaluate(part) for part in rows] for rows in splits]
        halves = [self._evaluate(part, gradient.derive) for part in last]
        # A device is waited for only now.
        self._value(whole, is_batch=not self.collected)
        for mean in (*halves, *chain.from_iterable(means)):
            self._value(mean)
        difference, size = gradient.norm(), max(gradient.sizes, default=0.0)
        dtype = coarsest_dtype(whole.mean, *self.params.values(), others=gradient.dtypes)
        del gradient  # as large as the model
        precision, level = rounding_levels(dtype, list(self.params.values()))
        relative = max(4 * precision, 0.0 if dtype == torch.float64 else COARSE)

        def complaint(slack: float, gradient_slack: float) -> str | None:
            for parts in (*means, halves):
                if wrong := find_complaint(whole, parts, 2 * slack, precision, self.count):
                    return wrong
            allowed = 4 * gradient_slack + relative * size
            if difference <= allowed or not math.isfinite(difference):
                return None  # a gradient that is not finite is refused when it is used
            return (
                f"the gradient of a batch of {self.count} differs from the mean over those of its "
                f"two parts by {difference:.2g}, and its norm is {size:.2g}: {NOT_A_MEAN}"
            )

        # Rounding is measured only where it might matter.
        return complaint(0.0, 0.0) and complaint(*self._rounding(splits[0], level))

    def _rounding(self, rows: Sequence[Tensor], level: float) -> tuple[float, float]:
        """How much loss and gradient change when every weight moves a little, by `level`.

        A part is evaluated by other routes than the batch, with other rounding; this measures how
        much it matters.
        """
        moved = replace(self, params=perturb_last_digit(self.params, level))
        everything, gradient = torch.arange(self.count), _Remainder()
        here, there = (parts._evaluate(everything, gradient.derive) for parts in (self, moved))
        changes = [abs(self._value(here) - self._value(there))]
        for part in rows:
            here, there = (parts._evaluate(part) for parts in (self, moved))
            changes.append(abs(self._value(here) - self._value(there)))
        return max(changes), gradient.norm()

    def _evaluate(self, rows: Tensor, derive: Derive | None = None) -> BatchMean:
        part = select_rows(self.batch, rows, self.count, self.dim)
        try:
            return self.evaluate(self.params, part, derive)
        except PART_ERRORS as error:
            is_batch = len(rows) == self.count and not self.collected
            if is_batch or isinstance(error, torch.OutOfMemoryError):
                raise
            raise _PartError(str(error)) from error

    def _value(self, mean: BatchMean, *, is_batch: bool = False) -> float:
        """A mean loss as a number, which must be finite."""
        value = float(mean.mean)
        try:
            check_finite_loss(value, 0)
        except InputError as error:
            if is_batch:
                raise
            raise _PartError(str(error)) from error
        return value

    def _order_by_target(self) -> Tensor | None:
        """The rows, sorted by the sums of the last tensor that has them."""
        dim, tensors = self.dim, list(tensors_in(self.batch))
        tensors = [t for t in tensors if t.ndim > dim and t.shape[dim] == self.count]
        if not tensors or tensors[-1].is_complex():
            return None
        last = tensors[-1].detach().movedim(dim, 0).reshape(self.count, -1)
        return last.double().sum(1).argsort()


class _Remainder:
    """The gradient of a batch, from which those of its parts are subtracted by their weights.

    A gradient may exist in training mode only (an operation in place after dropout); the remainder
    is then zero. What fails here is reported where it is needed.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.dtypes: set[torch.dtype] = set()
        """Those of the operations that the first loss was computed by."""
        self.sizes: list[float] = []
        """Norms of all gradients so far."""
        self._tensors: Params = {}
        self._weight: float | None = None
        """That of the batch; None before its gradient is known."""
        self._exists = wanted
        """Whether there is a gradient; if none is wanted, only dtypes are read."""

    def derive(self, mean: BatchMean, leaves: Params) -> None:
        """Take the gradient of the batch the first time, and subtract a gradient afterwards."""
        self.dtypes = self.dtypes or derivatives.graph_dtypes(mean.mean)
        square = 0.0
        factor = None if self._weight is None else -mean.weight / self._weight
        self._weight = mean.weight or 1.0 if self._weight is None else self._weight

        def use(gradients: Params) -> None:
            nonlocal square
            square += sum(square_norms(gradients).values())
            if factor is None:
                self._tensors |= gradients
                return
            new = {n: torch.zeros_like(g) for n, g in gradients.items() if n not in self._tensors}
            self._tensors |= new
            totals = [self._tensors[name] for name in gradients]
            add_scaled(totals, list(gradients.values()), factor)

        if factor == 0 or not self._exists:
            return
        try:
            derivatives.stream_gradient(mean.mean, leaves, use)
        except (RuntimeError, InputError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self._exists = False
        self.sizes.append(math.sqrt(square))

    def norm(self) -> float:
        """The norm of what remains."""
        return norm(self._tensors) if self._exists else 0.0


def rounding_levels(dtype: torch.dtype, params: Sequence[Tensor]) -> tuple[float, float]:
    """The relative rounding between a batch and its parts: of a loss, and of the weights.

    Both are above the last digit of the least precise dtype in use: products and convolutions of
    other sizes take other routes.
    """
    eps = torch.finfo(dtype).eps
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


def find_complaint(
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
