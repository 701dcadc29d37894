"""How the loss of a batch is read: as one mean with its weight, or example by example.

An example is whatever has one loss: a row of the data, or a token in a language model.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective.batches import map_tensors, tensors_in
from tacit.objective.randomness import Noise

Loss = Callable[[Any, Any], Tensor]
BatchLoss = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""batch_loss(model, batch), or batch_loss(model, batch, noise)."""


class BatchMean(NamedTuple):
    """The mean loss of a batch, its total weight, and its number of examples."""

    mean: Tensor
    weight: float
    size: int


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


ReadMean = Callable[[nn.Module, Any, Tensor | None, Noise | None], BatchMean]
ReadExamples = Callable[[nn.Module, Any, Tensor | None, Noise | None], ExampleOutputs]


class LossReader(NamedTuple):
    """Two functions of (model, batch, weights, noise): the batch's mean, and its examples."""

    mean: ReadMean
    examples: ReadExamples


def mean_loss_reader(loss: Loss) -> LossReader:
    """Read batches (inputs, …, target) with a mean-reduced loss(output, target)."""

    def read_mean(model: nn.Module, batch: Any, weights: Tensor | None, _: Any) -> BatchMean:
        inputs, target = split_batch(batch)
        output = model(*inputs)
        count = count_examples(batch)
        if weights is not None:
            # Weights need the loss of each example: the mean-reduced loss of a batch of one.
            return _weighted_mean(_losses_one_by_one(loss, output, target), weights)
        mean = loss(output, target)
        if not isinstance(mean, Tensor) or mean.ndim:
            raise InputError(
                f"loss(output, target) returned {_describe(mean)}: a scalar is needed, the mean "
                "over the batch (reduction='mean'). For one loss per example use "
                "Objective.from_batch_loss."
            )
        return BatchMean(mean, count, count)

    def read_examples(
        model: nn.Module, batch: Any, weights: Tensor | None, _: Any
    ) -> ExampleOutputs:
        inputs, target = split_batch(batch)
        return _examples_of_mean(loss, model(*inputs), target, weights, count_examples(batch))

    return LossReader(read_mean, read_examples)


def batch_loss_reader(batch_loss: BatchLoss) -> LossReader:
    """Read batches with batch_loss(model, batch): one loss per example, or (losses, weights)."""

    def read_mean(
        model: nn.Module, batch: Any, weights: Tensor | None, noise: Noise | None
    ) -> BatchMean:
        losses, weights = _example_losses(batch_loss, model, batch, weights, noise)
        if weights is not None:
            return _weighted_mean(losses, weights)
        if losses.dtype.itemsize < 4:
            losses = losses.float()
        mean = losses.mean() if len(losses) else losses.sum()  # a batch of padding has weight 0
        return BatchMean(mean, len(losses), len(losses))

    def read_examples(
        model: nn.Module, batch: Any, weights: Tensor | None, noise: Noise | None
    ) -> ExampleOutputs:
        losses, weights = _example_losses(batch_loss, model, batch, weights, noise)
        if weights is not None:
            _check_example_weights(losses, weights)
        return examples_of_losses(losses, weights)

    return LossReader(read_mean, read_examples)


def examples_of_losses(losses: Tensor, weights: Tensor | None = None) -> ExampleOutputs:
    """Examples whose outputs are their losses: the derivative is one, the Hessian zero."""
    ones = torch.ones_like(losses, requires_grad=False)
    return ExampleOutputs((losses,), (ones,), lambda direction: [None], weights, len(losses))


def _examples_of_mean(
    loss: Loss, outputs: Any, target: Any, weights: Tensor | None, count: int
) -> ExampleOutputs:
    """Examples of a batch with a mean-reduced loss.

    The gradient of count·mean with respect to the outputs has ∂ℓ_i/∂f_i in row i.
    """
    floating, inputs_of_loss = [], []

    def cut_graph(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        floating.append(tensor)
        inputs_of_loss.append(tensor.detach().requires_grad_())
        return inputs_of_loss[-1]

    with torch.enable_grad():
        mean = loss(map_tensors(outputs, cut_graph), target)
        if not inputs_of_loss or not mean.requires_grad:
            raise InputError(
                "the loss of single examples cannot be computed from the model's output: no tensor "
                "in the output reaches the loss. Use Objective.from_batch_loss."
            )
        gradients = torch.autograd.grad(
            count * mean, inputs_of_loss, create_graph=True, allow_unused=True
        )
    used = [i for i, gradient in enumerate(gradients) if gradient is not None and gradient.any()]
    if not used:  # a batch that is fitted exactly has zero gradients, but still has examples
        rows = [i for i, output in enumerate(floating) if output.ndim and len(output) == count]
        used = [i for i in rows if gradients[i] is not None][:1]
    for i in used:
        if not floating[i].ndim or len(floating[i]) != count:
            raise InputError(
                f"the model gave shape {tuple(floating[i].shape)} for {count} examples: the loss "
                "of single examples needs one row per example. Use Objective.from_batch_loss."
            )
    return ExampleOutputs(
        tuple(floating[i] for i in used),
        tuple(gradients[i].detach() for i in used),
        _hessian_product([gradients[i] for i in used], [inputs_of_loss[i] for i in used]),
        weights,
        count,
    )


def _hessian_product(
    gradients: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], Sequence[Tensor | None]]:
    """Products of the loss's Hessian in the outputs; it is block-diagonal over the examples."""

    def product(direction: Sequence[Tensor]) -> Sequence[Tensor | None]:
        pairs = [(g, d) for g, d in zip(gradients, direction, strict=True) if g.requires_grad]
        if not pairs:  # the loss is linear in the outputs
            return [None] * len(outputs)
        curved, directions = zip(*pairs, strict=True)
        return torch.autograd.grad(
            curved, list(outputs), directions, retain_graph=True, allow_unused=True
        )

    return product


def _example_losses(
    batch_loss: BatchLoss,
    model: nn.Module,
    batch: Any,
    weights: Tensor | None,
    noise: Noise | None,
) -> tuple[Tensor, Tensor | None]:
    losses = batch_loss(model, batch) if noise is None else batch_loss(model, batch, noise)
    if isinstance(losses, tuple) and len(losses) == 2 and isinstance(losses[1], Tensor):
        if weights is not None:
            raise InputError(
                "weights were given twice: by weights= and by batch_loss. Leave one out."
            )
        losses, weights = losses
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        raise InputError(
            f"batch_loss(model, batch) returned {_describe(losses)}: a 1-D tensor is needed, one "
            "loss per example or token (reduction='none', padding left out), so that batches "
            "of different size average exactly."
        )
    return losses, weights


def _describe(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


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


def _losses_one_by_one(loss: Loss, output: Any, target: Any) -> Tensor:
    def loss_of_one(output: Any, target: Any) -> Tensor:
        return loss(*(map_tensors(value, lambda t: t.unsqueeze(0)) for value in (output, target)))

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
    _check_example_weights(losses, weights)
    if losses.dtype.itemsize < 4:
        losses = losses.float()
    weights = weights.to(losses)
    total = float(weights.double().sum()) if weights.device.type != "mps" else float(weights.sum())
    mean = (weights * losses).sum() / (total or 1.0)
    return BatchMean(mean, total, len(losses))
