"""One pass over the data: every batch, in every draw, through a borrowed model.

Before any gradient is trusted, data, model and loss are checked on a few examples, the probe.
"""

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
from tacit.objective import batches, derivatives, survey
from tacit.objective.batches import Batches, BatchPair
from tacit.objective.borrowing import (
    call_with_params,
    check_graph,
    forked_randomness,
    is_batch_norm,
    temporary_mode,
)
from tacit.objective.losses import (
    BatchMean,
    LossPerBatch,
    MeanLoss,
    Reader,
    WholeBatches,
    check_finite_loss,
    count_examples,
)
from tacit.objective.models import BatchNorm, without_statistics
from tacit.objective.params import (
    Params,
    Point,
    check_finite,
    float64_zeros,
    same_buffers,
)
from tacit.objective.randomness import Noise, seed_draw
from tacit.objective.survey import Facts, Survey

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
    unreached: tuple[str, ...] = ()
    """Parameters without a derivative, that is, None, in every batch."""


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
    redraws_data: bool = False
    """Whether the data is read anew for each draw, with its randomness seeded by (seed, draw)."""

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the model's parameters."""
        return {p.device for p in self.model.parameters()}

    @contextmanager
    def prepared(self, *, training: bool) -> Iterator[None]:
        """Set the model's mode and fork the random state; both are restored."""
        forked = forked_randomness(self.devices, self.batches.generators)
        with forked, temporary_mode(self.model, training=training, batch_norm=self.batch_norm):
            yield

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
            yield batch, weights

    def regroups(self) -> bool:
        """Whether the examples of the first batch depend on the draw."""
        with self.prepared(training=False):
            batches_of_draws = [self.first_batch(draw)[0] for draw in range(2)]
        return not batches.same(*batches_of_draws)

    def first_batch(self, draw: int = 0) -> BatchPair:
        """The first batch and its weights."""
        first = next(self.read(draw), None)
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
        if self.batch_norm == "running" and not isinstance(params, Point):
            raise InputError(
                "a point came without its running statistics, which batch_norm='running' needs: "
                "pass what Objective.point returns."
            )
        noise = Noise(self.seed, draw or 0, index) if self.paired else None
        try:
            return call_with_params(self.model, params, lambda model: use(model, noise))
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
        first: Survey | None = None,
    ) -> tuple[BatchMean, Sequence[Tensor | None]]:
        """The mean loss of one batch, in one draw, and its derivative; neither has a graph."""
        leaves = derivatives.leaves(params)  # some losses differentiate in themselves

        def read(model: nn.Module, noise: Noise | None):
            batch_mean = self.loss.mean(model, pair, noise)
            if first is not None:
                first.see(pair[0], batch_mean)
            return batch_mean, () if derivative is None else derivative(batch_mean.mean, leaves)

        batch_mean, vectors = self.call(leaves, read, draw=draw, index=index)
        if derivative is not None and index == 0:
            check_graph(self.model, batch_mean.mean, leaves)
        batch_mean = BatchMean(batch_mean.mean.detach(), batch_mean.weight, batch_mean.size)
        return batch_mean, vectors

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
        self,
        params: Params,
        derivative: Derivative,
        draws: Sequence[int] | None,
        first: Survey | None = None,
    ) -> PassResult:
        """One pass: the means over batches of the loss and of its derivative.

        The first pass has a survey, which collects what is to be checked.
        """
        readings = self.readings(draws)
        sums = {} if derivative is None else float64_zeros(params)
        unreached = dict.fromkeys(sums)
        value, total_weight, count = 0.0, 0.0, 0
        with self.prepared(training=self.training), torch.enable_grad():
            for draws_here in readings:
                count, shares = 0, len(draws_here) * len(readings)
                for index, pair in enumerate(self.read(draws_here[0])):
                    weight, size = 0.0, 0
                    for draw in draws_here:
                        (mean, weight, size, *_), vectors = self.differentiate(
                            params, pair, derivative, draw, index, first
                        )
                        check_finite_loss(mean, index)
                        value += float(mean.detach()) * weight / shares
                        _add(sums, vectors, weight / shares, unreached)
                        del vectors  # the next backward pass needs the memory
                    total_weight, count = total_weight + weight / len(readings), count + size
                    if first is not None and survey.is_due(index):
                        self.check_mean_loss(params, pair[0])
        if not total_weight:
            raise InputError(
                f"the data gave {count} examples of total weight 0: tacit reads the data more than "
                "once. Pass data that can be read repeatedly, with weight above 0."
            )
        for tensor in sums.values():
            tensor.div_(total_weight)
        check_finite(sums, what="the derivative of the loss")
        return PassResult(value / total_weight, sums, count, tuple(unreached))

    def check_survey(self, params: Params, first: Survey) -> Facts:
        """Check the examples that the first pass collected; the facts that the pass showed."""
        if first.one_number and first.several_examples and first.batches > 1:
            raise InputError(f"batch_loss returns one number for every batch: {survey.ONE_EACH}")
        for examples in first.collected():
            self.check_mean_loss(params, examples, collected=True)
        ignored = first.ignored / max(first.tokens, 1)
        if ignored > survey.MIN_IGNORED:
            # A loss may be flat at this point (a margin that is kept), but not at all points.
            with self.prepared(training=False), torch.enable_grad():
                here, *elsewhere = (
                    self._ignored_tokens(point, first.with_ignored)
                    for point in (params, *survey.random_points(params))
                )
            always = torch.stack([here, *elsewhere]).all(0)
            ignored *= float(always.sum()) / max(1, int(here.sum()))
        return Facts(ignored, len(first.row_sizes) > 1, first.counts_tokens)

    def _ignored_tokens(self, params: Params, batch: Any) -> Tensor:
        """Which tokens of a batch the loss does not depend on, as a mask."""
        masks: list[Tensor] = []

        def read(model: nn.Module, noise: Noise | None) -> None:
            mean, _, _, tokens, *_ = self.loss.mean(model, (batch, None), noise)
            if tokens is not None:
                tokens.when_known(masks.append)
                if not masks and tokens.values is not None:
                    torch.autograd.grad(mean, tokens.values)

        self.call(derivatives.leaves(params), read)
        return masks[0] if masks else torch.zeros(0, dtype=torch.bool)

    def check(self, params: Params, data: Any) -> BatchPair:
        """Check data, model and loss on the probe, and return it.

        Refused are data that cannot be read repeatedly, a loss that is not deterministic and, if
        it should be one, a loss that is not a mean over examples.
        """
        with self.prepared(training=self.training), torch.enable_grad():
            probe = self._choose_probe()
            copies = same_buffers({n: p.clone() for n, p in params.items()}, params)
            self._check_deterministic(copies, probe)
            _check_unwritten(copies, params)
        self.check_mean_loss(params, probe[0])
        return probe

    def _choose_probe(self) -> BatchPair:
        """Examples spread over the data where that is cheap, else the first of the first batch."""
        first = self.first_batch()
        if isinstance(self.loss, WholeBatches):
            return first
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

    def check_mean_loss(self, params: Params, batch: Any, *, collected: bool = False) -> None:
        """Refuse a loss that is not a mean over the examples of this batch, in eval mode.

        A loss that takes its noise cannot be compared: its noise differs on a part of a batch.
        """
        if self.loss.interacting or self.paired:
            return
        if isinstance(self.loss, WholeBatches) and self.batch_norm == "batch":
            # A part of a batch has other statistics; with running ones it can be compared.
            if not without_statistics(self.model):
                self._by_example().check_mean_loss(params, batch, collected=collected)
            return
        with self.prepared(training=False), torch.enable_grad():
            survey.check_mean_loss(
                self._evaluate_part, params, batch,
                by_row=isinstance(self.loss, MeanLoss), repeatable=not self.training,
                collected=collected,
            )  # fmt: skip

    def _by_example(self) -> "Passes":
        """The same with running statistics, and with each example's loss where that is known."""
        if not isinstance(self.loss, WholeBatches):
            return replace(self, batch_norm=None)
        reader = self.loss.reader
        if isinstance(reader, LossPerBatch):
            reader = replace(self.loss, equal=False)  # weighted by the counts
        return replace(self, loss=reader, batch_norm=None)

    def check_statistics(self, params: Params, batch: Any) -> None:
        """Refuse batch norm written by hand, which `is_batch_norm` does not recognise.

        Such a module writes running statistics in training mode, and there the loss of an example
        depends on the others of its batch.
        """
        if self.loss.interacting or self.paired or not any(map(_statistics, self.model.modules())):
            return
        passes, pair = self._by_example(), (batch, None)
        try:
            with passes.prepared(training=True), torch.enable_grad():
                written = passes.call(
                    params,
                    lambda model, _: _written(model, lambda: passes.loss.mean(model, pair, None)),
                )
        except (*survey.PART_ERRORS, AttributeError):  # training mode may have other outputs
            return
        for module, tensor in written.items():
            try:
                with passes.prepared(training=False), torch.enable_grad():
                    module.training = True
                    survey.check_mean_loss(
                        passes._evaluate_part, params, batch,
                        by_row=isinstance(passes.loss, MeanLoss), repeatable=False,
                    )  # fmt: skip
            except InputError as error:
                raise InputError(
                    f"a {type(module).__name__} writes {tensor!r} in training mode, where the "
                    "examples of a batch interact: this is batch norm, but is not recognised as "
                    "such. Name its statistics running_mean and running_var and pass batch_norm="
                    "'batch', or pass batch_norm='running' for those of inference."
                ) from error

    def _evaluate_part(
        self, params: Params, batch: Any, differentiate: bool
    ) -> tuple[BatchMean, Sequence[Tensor | None]]:
        """The mean loss of a batch; on demand its gradient, which is empty if there is none.

        A gradient may exist in training mode only (an operation in place after dropout). What fails
        here is reported where it is needed.
        """

        def gradient(mean: Tensor, leaves: Params) -> Sequence[Tensor | None]:
            try:
                return derivatives.gradient(mean, leaves) if mean.requires_grad else ()
            except RuntimeError:
                return ()

        return self.differentiate(
            params, (batch, None), gradient if differentiate else None, None, index=1
        )

    def check_rows_are_examples(self, params: Params, probe: BatchPair) -> None:
        """Refuse outputs whose first dimension equals the batch size only by coincidence."""
        if isinstance(self.loss, MeanLoss) and (count := count_examples(probe[0])) > 1:
            half = batches.slice_batch(self.to_model(probe), slice(count // 2), count)
            self.examples(params, lambda examples: None, half, draw=0)


def _statistics(module: nn.Module) -> Params:
    """The tensors of a module that may be running statistics, batch norm's own left out."""
    tensors = {} if is_batch_norm(module) else {**vars(module), **module._buffers}
    return {n: t for n, t in tensors.items() if isinstance(t, Tensor) and t.is_floating_point()}


def _written(model: nn.Module, run: Callable[[], object]) -> dict[nn.Module, str]:
    """The modules whose statistics change while something runs, each with the name of one."""
    before = [
        (module, name, tensor, tensor.detach().clone())
        for module in model.modules()
        for name, tensor in _statistics(module).items()
    ]
    run()
    written: dict[nn.Module, str] = {}
    for module, name, tensor, value in before:
        now = getattr(module, name, tensor)
        if not isinstance(now, Tensor) or not torch.equal(now, value):
            written.setdefault(module, name)
    return written


def _check_unwritten(copies: Params, params: Params) -> None:
    """Refuse a model or loss that wrote into the parameters (copies of them) that it was run with.

    Views of the model's own memory are used later on, and the loss is no function of θ alone.
    """
    for name, copy in copies.items():
        versions = 0 if copy.is_inference() else copy._version
        if versions or not torch.equal(copy, params[name]):
            raise InputError(
                f"the forward pass or the loss writes into parameter {name!r}: max_norm= of an "
                "embedding, clipping or rescaling of weights in forward, or weights that the loss "
                "moves in place. Set max_norm=None; constrain weights after optimizer.step()."
            )


def first_examples(pair: BatchPair) -> BatchPair:
    """The first examples of a batch (inputs, …, target)."""
    return batches.slice_batch(pair, slice(PROBE_EXAMPLES), count_examples(pair[0]))


def _add(
    sums: Params, vectors: Sequence[Tensor | None], weight: float, unreached: dict[str, None]
) -> None:
    """Add a batch's derivative to the sums, and take the parameters that have one off the list."""
    for (name, total), vector in zip(sums.items(), vectors, strict=True):
        if vector is not None:
            total.add_(vector.to(total.device), alpha=weight)
            unreached.pop(name, None)


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
