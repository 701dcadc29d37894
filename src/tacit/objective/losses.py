"""How the loss of a batch is read: as one mean with its weight, or example by example.

An example is whatever has one loss: a row of the data, or a token in a language model. Where
examples interact (contrastive losses, batch statistics), only a whole batch has a loss of its own.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective.batches import (
    BatchPair,
    map_tensors,
    row_count,
    tensors_in,
)
from tacit.objective.derivatives import pull_back
from tacit.objective.params import describe, to_float64
from tacit.objective.randomness import Noise

Loss = Callable[[Any, Any], Tensor]
BatchLoss = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""batch_loss(model, batch), or batch_loss(model, batch, noise)."""
Count = Callable[..., Any]
"""count(batch), or count(model, batch): how many examples or tokens a batch's mean is over."""


class BatchMean(NamedTuple):
    """The mean loss of a batch, its total weight, and its number of examples."""

    mean: Tensor
    weight: float
    size: int
    tokens: "Tokens | None" = None
    outputs: "Outputs | None" = None


class Outputs(NamedTuple):
    """The model's outputs and the targets of a batch, from which its loss can be computed anew."""

    output: Any
    target: Any
    loss: "Loss"


class Tokens(NamedTuple):
    """What the loss of every token is computed from, to find tokens that the loss ignores."""

    values: Tensor | None
    """The model's output, or the losses, of which an ignored token's is 0; None if unknown."""
    are_losses: bool
    class_dim: int | tuple[int, ...] | None = None
    """The dimensions of the output that are not those of tokens, if any."""
    per_row: float = 1.0
    """Number of targets per row of the batch."""

    @property
    def are_one(self) -> bool:
        """Whether there is one loss for a whole batch."""
        return self.are_losses and self.values is not None and len(self.values) == 1

    def when_known(self, use: Callable[[Tensor], None]) -> None:
        """Call use(ignored), a mask over the tokens: now, or when the gradient is computed."""
        if self.values is None or not self.values.numel():
            return
        if self.are_losses:
            use(self.values.detach() == 0)
        elif self.values.requires_grad:
            self.values.register_hook(lambda gradient: use(self._without(gradient)))

    def _without(self, gradient: Tensor) -> Tensor:
        zero = gradient.detach() == 0
        return zero if self.class_dim is None else zero.all(self.class_dim)


class ExampleOutputs(NamedTuple):
    """The outputs of a batch, one row per example, and how each example's loss depends on them.

    For example i with outputs f_i, the derivative of its loss is D ℓ_i = ⟨∂ℓ_i/∂f_i, D f_i⟩.
    """

    outputs: tuple[Tensor, ...]
    output_gradients: tuple[Tensor, ...]
    """∂ℓ_i/∂f_i, without a graph."""
    output_hessian_product: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
    """(∂²ℓ_i/∂f_i²) times a direction of the outputs; None where it is zero."""
    weights: Tensor | None
    size: int

    def scaled_gradients(self, factors: Tensor) -> list[Tensor]:
        """∂ℓ_i/∂f_i times a factor for every example."""
        return [factors.view(-1, *[1] * (g.ndim - 1)).to(g) * g for g in self.output_gradients]


@dataclass(frozen=True)
class MeanLoss:
    """Reads batches (inputs, …, target) with a mean-reduced loss(output, target)."""

    function: Loss
    interacting: ClassVar[bool] = False

    def mean(self, model: nn.Module, pair: BatchPair, _: Noise | None) -> BatchMean:
        """The mean loss of a batch."""
        batch, weights = pair
        inputs, target = split_batch(batch)
        output, count = model(*inputs), count_examples(batch)
        with broadcasts_refused(count):
            if weights is not None:
                # Weights need the loss of each example: the mean-reduced loss of a batch of one.
                return _weighted_mean(_losses_one_by_one(self.function, output, target), weights)
            mean = self.function(output, target)
        if not isinstance(mean, Tensor) or mean.ndim:
            raise InputError(
                f"loss(output, target) returned {describe(mean)}: a scalar is needed, as with "
                "reduction='mean'. For one loss per example use Objective.from_batch_loss."
            )
        outputs = Outputs(map_tensors(output, Tensor.detach), target, self.function)
        return BatchMean(mean, count, count, _output_tokens(output, target, count), outputs)

    def examples(self, model: nn.Module, pair: BatchPair, _: Noise | None) -> ExampleOutputs:
        """The examples of a batch: row i of the gradient of count·mean by the outputs is ∂ℓ_i/∂f_i.

        The Hessian of the loss in the outputs is block-diagonal over the examples.
        """
        batch, weights = pair
        inputs, target = split_batch(batch)
        output, count = model(*inputs), count_examples(batch)
        outputs = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        leaves = [tensor.detach().requires_grad_() for tensor in outputs]
        remaining = iter(leaves)
        cut = map_tensors(output, lambda t: next(remaining) if t.is_floating_point() else t)
        with torch.enable_grad():
            mean = self.function(cut, target)
            if not leaves or not mean.requires_grad:
                raise InputError(
                    "the loss of single examples cannot be computed from the model's output: none "
                    "of its tensors reaches the loss. Use Objective.from_batch_loss."
                )
            gradients = torch.autograd.grad(
                count * mean, leaves, create_graph=True, allow_unused=True
            )
        parts = [p for p in zip(outputs, gradients, leaves, strict=True) if p[1] is not None]
        # A batch that is fitted exactly has zero gradients, but still has examples.
        fitted = [part for part in parts if part[0].shape[:1] == (count,)][:1]
        used = [part for part in parts if part[1].any()] or fitted
        if not used or any(part[0].shape[:1] != (count,) for part in used):
            raise InputError(
                f"the model gave shapes {[tuple(t.shape) for t in outputs]} for {count} examples: "
                "losses of single examples need one row per example. Use Objective.from_batch_loss."
            )
        outputs, gradients, leaves = zip(*used, strict=True)

        def hessian_product(direction: Sequence[Tensor]) -> Sequence[Tensor | None]:
            return pull_back(zip(gradients, direction, strict=True), leaves, retain_graph=True)

        output_gradients = tuple(gradient.detach() for gradient in gradients)
        return ExampleOutputs(outputs, output_gradients, hessian_product, weights, count)


@dataclass(frozen=True)
class ExampleLosses:
    """Reads batches with batch_loss(model, batch): one loss per example, or (losses, weights)."""

    function: BatchLoss
    interacting: ClassVar[bool] = False

    def mean(self, model: nn.Module, pair: BatchPair, noise: Noise | None) -> BatchMean:
        """The mean loss of a batch."""
        losses, weights = self._losses(model, pair, noise)
        if weights is not None:
            return _weighted_mean(losses, weights)
        if losses.dtype.itemsize < 4:
            losses = losses.float()
        mean = losses.mean() if len(losses) else losses.sum()  # a batch of padding has weight 0
        return BatchMean(mean, len(losses), len(losses), Tokens(losses, are_losses=True))

    def examples(self, model: nn.Module, pair: BatchPair, noise: Noise | None) -> ExampleOutputs:
        """The examples of a batch."""
        return examples_of_losses(*self._losses(model, pair, noise))

    def _losses(
        self, model: nn.Module, pair: BatchPair, noise: Noise | None
    ) -> tuple[Tensor, Tensor | None]:
        batch, weights = pair
        losses = _call(self.function, model, batch, noise)
        if isinstance(losses, tuple) and len(losses) == 2 and isinstance(losses[1], Tensor):
            if weights is not None:
                raise InputError(
                    "weights come twice: by weights= and by batch_loss. Leave one out."
                )
            losses, weights = losses
        if not isinstance(losses, Tensor) or losses.ndim != 1:
            raise InputError(
                f"batch_loss(model, batch) returned {describe(losses)}: a 1-D tensor is needed, "
                "one loss per example or token (reduction='none', padding left out). Where the "
                "examples of a batch interact, pass interacting=True with one number per batch; "
                "for a model that returns its mean loss use Objective.from_mean_loss."
            )
        if weights is not None:
            _check_example_weights(losses, weights)
        return losses, weights


@dataclass(frozen=True)
class LossPerBatch:
    """Reads batches with batch_loss(model, batch): one number per batch.

    A batch has the weight that count gives it, or 1. Only `WholeBatches` reads examples from it.
    """

    function: BatchLoss
    count: Count | None = None

    def mean(self, model: nn.Module, pair: BatchPair, noise: Noise | None) -> BatchMean:
        """The loss of a batch, and its weight."""
        batch, weights = pair
        if weights is not None:
            raise InputError(
                "weights= has one weight per example, but the loss is one number per batch: apply "
                "the weights inside the loss."
            )
        loss = _call(self.function, model, batch, noise)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InputError(
                f"the loss of a batch is {describe(loss)}: one number per batch is needed, a "
                "scalar tensor. For one loss per example use Objective.from_batch_loss without "
                "interacting=True."
            )
        weight = 1.0 if self.count is None else _count_of(self.count, model, batch)
        return BatchMean(loss.reshape(()), weight, 1)


@dataclass(frozen=True)
class WholeBatches:
    """Reads every batch of another reader as one example: the batch's mean, with its weight.

    For losses whose examples interact, so that the loss of one example alone does not exist.
    """

    reader: "MeanLoss | ExampleLosses | LossPerBatch | ChangedBatches"
    equal: bool = False
    """Whether batches without weights= count equally, as every step of training does."""
    interacting: bool = True
    """Whether examples interact; if not, the loss of a batch is the mean over its parts."""

    @property
    def function(self) -> Callable[..., Any]:
        """The user's loss."""
        return self.reader.function

    def mean(self, model: nn.Module, pair: BatchPair, noise: Noise | None) -> BatchMean:
        """The mean loss of a batch, which counts as one example."""
        batch_mean = self.reader.mean(model, pair, noise)._replace(size=1)
        if self.equal and pair[1] is None and batch_mean.weight:
            return batch_mean._replace(weight=1.0)
        return batch_mean

    def examples(self, model: nn.Module, pair: BatchPair, noise: Noise | None) -> ExampleOutputs:
        """The batch as one example."""
        mean, weight, *_ = self.mean(model, pair, noise)
        return examples_of_losses(mean[None], torch.tensor([weight], dtype=torch.float64))


@dataclass(frozen=True)
class ChangedBatches:
    """Reads batches that a technique changes first, such as by noise on the inputs."""

    reader: "MeanLoss | ExampleLosses | LossPerBatch | ChangedBatches"
    change: Callable[[nn.Module, BatchPair, Noise], BatchPair] | None
    """change(model, pair, noise) returns the batch to be read; None leaves it as it is."""
    noisy: bool
    """Whether the reader takes noise too."""
    copies: int = 1
    """Rows of the changed batch per example."""
    mixes: bool = False
    """Whether a row of the changed batch depends on more than one example."""
    interacting: ClassVar[bool] = False

    @property
    def function(self) -> Callable[..., Any]:
        """The user's loss."""
        return self.reader.function

    def mean(self, model: nn.Module, pair: BatchPair, noise: Noise | None) -> BatchMean:
        """The mean loss of the changed batch; it keeps its weight and its number of examples."""
        mean = self.reader.mean(model, self._changed(model, pair, noise), self._inner(noise))
        if self.copies == 1:
            return mean
        return BatchMean(mean.mean, mean.weight, mean.size // self.copies)

    def examples(self, model: nn.Module, pair: BatchPair, noise: Noise | None) -> ExampleOutputs:
        """The examples of the changed batch."""
        if self.mixes or isinstance(self.reader, LossPerBatch):
            raise InputError(
                "the technique mixes examples, so that the loss of a single one does not exist, "
                "nor its influence: error bars of draws are in Fit.intervals()."
            )
        return self.reader.examples(model, self._changed(model, pair, noise), self._inner(noise))

    def _changed(self, model: nn.Module, pair: BatchPair, noise: Noise | None) -> BatchPair:
        return pair if self.change is None or noise is None else self.change(model, pair, noise)

    def _inner(self, noise: Noise | None) -> Noise | None:
        return noise if self.noisy else None


Reader = MeanLoss | ExampleLosses | WholeBatches | ChangedBatches


def whole_batches(reader: Reader) -> WholeBatches:
    """The reader with batches as its examples, each with the same weight."""
    if isinstance(reader, WholeBatches):
        return replace(reader, equal=True)
    return WholeBatches(reader, interacting=False, equal=True)


def examples_of_losses(losses: Tensor, weights: Tensor | None = None) -> ExampleOutputs:
    """Examples whose outputs are their losses: the derivative is one, the Hessian zero."""
    ones = torch.ones_like(losses, requires_grad=False)
    return ExampleOutputs((losses,), (ones,), lambda direction: [None], weights, len(losses))


def split_batch(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """A batch (inputs, …, target) as its inputs and its target."""
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise InputError(
            f"a batch is a {type(batch).__name__}: (inputs, …, target) is needed. For data in "
            "tensors pass a tuple (X, y); for other batches use Objective.from_batch_loss."
        )
    *inputs, target = batch
    return tuple(inputs), target


def count_examples(batch: Any) -> int:
    """How many examples a batch (inputs, …, target) holds."""
    input_sizes, target_sizes = (
        [len(t) for t in tensors_in(part) if t.ndim] for part in split_batch(batch)
    )
    if not target_sizes:
        raise InputError(
            "the target of a batch holds no tensor with one row per example. Stack targets into a "
            "tensor, or use Objective.from_batch_loss."
        )
    if input_sizes and input_sizes[0] != target_sizes[0]:
        raise InputError(
            f"inputs and targets differ in length: {input_sizes[0]} and {target_sizes[0]} in one "
            "batch. Every tensor needs one row per example."
        )
    return target_sizes[0]


def _call(
    function: BatchLoss, model: nn.Module, batch: Any, noise: Noise | None
) -> Tensor | tuple[Tensor, Tensor]:
    with broadcasts_refused(row_count(batch)):
        return function(model, batch) if noise is None else function(model, batch, noise)


@contextmanager
def broadcasts_refused(count: int | None = None) -> Iterator[None]:
    """Make torch's warning that output and target differ in shape an error.

    With one example it is harmless: `squeeze` of a last batch of one gives shapes () and (1,).
    """
    with warnings.catch_warnings():
        action = "ignore" if count == 1 else "error"
        warnings.filterwarnings(action, "Using a target size", UserWarning)
        try:
            yield
        except UserWarning as warning:
            raise InputError(
                f"output and target differ in shape, and torch would broadcast them ({warning}): "
                "give them the same shape, for instance with target.unsqueeze(1)."
            ) from warning


def _output_tokens(output: Any, target: Any, count: int) -> Tokens:
    """The outputs by token, where output and target say which dimension is not one of tokens."""
    per_row = 1.0
    if isinstance(target, Tensor) and target.ndim and len(target):
        per_row = target.numel() / len(target)
    if isinstance(output, Tensor):
        for dim in (None, 1, -1):
            shape = list(output.shape)
            if dim is not None and len(shape) > 1:
                del shape[dim]
            if isinstance(target, Tensor) and shape == list(target.shape):
                return Tokens(output, are_losses=False, class_dim=dim, per_row=per_row)
        if output.ndim and len(output) == count:  # a target with a mask beside it, for instance
            others = tuple(range(1, output.ndim)) or None
            return Tokens(output, are_losses=False, class_dim=others, per_row=per_row)
    return Tokens(None, are_losses=False, per_row=per_row)


def check_finite_loss(mean: float, index: int) -> None:
    """Refuse a loss that is not a finite number."""
    if not math.isfinite(mean):
        raise InputError(
            f"the loss is {mean} on batch {index} (counted from 0), with finite "
            "data and parameters: an overflow, or log 0? Use a wider dtype, or a loss from logits."
        )


def _count_of(count: Count, model: nn.Module, batch: Any) -> float:
    """How many examples or tokens the mean of a batch is over."""
    try:
        number = count(batch) if len(signature(count).parameters) == 1 else count(model, batch)
        value = float(number)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"count cannot be read ({error}): pass count(batch) or count(model, batch), the number "
            "of examples or tokens that the batch's mean is over."
        ) from error
    if not 0 <= value < math.inf:
        raise InputError(f"count is {value} for a batch: a number of examples or tokens is needed.")
    return value


def _losses_one_by_one(loss: Loss, output: Any, target: Any) -> Tensor:
    def loss_of_one(output: Any, target: Any) -> Tensor:
        return loss(*map_tensors((output, target), lambda t: t.unsqueeze(0)))

    try:
        losses = torch.func.vmap(loss_of_one)(output, target)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"the loss cannot be computed for one example at a time, which weights= needs "
            f"({error}). Use Objective.from_batch_loss and return (losses, weights)."
        ) from error
    if losses.ndim != 1:
        raise InputError(
            f"the loss of one example has shape {tuple(losses.shape[1:])}: with weights= the loss "
            "must be mean-reduced to a scalar."
        )
    return losses


def _check_example_weights(losses: Tensor, weights: Tensor) -> None:
    if weights.shape != losses.shape:
        raise InputError(
            f"weights have shape {tuple(weights.shape)} for losses of shape "
            f"{tuple(losses.shape)}: pass one weight per loss."
        )
    converted = weights.to(losses.device, torch.promote_types(losses.dtype, torch.float32))
    if not torch.isfinite(converted).all() or (converted < 0).any():
        raise InputError("weights must be finite and not negative.")


def _weighted_mean(losses: Tensor, weights: Tensor) -> BatchMean:
    if losses.dtype.itemsize < 4:
        losses = losses.float()
    weights = weights.to(losses)
    total = float(to_float64(weights).sum())
    mean = (weights * losses).sum() / (total or 1.0)
    return BatchMean(mean, total, len(losses))
