"""How the loss of a batch becomes one mean, the weight it stands for, and a count of units."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.data import apply, tensors
from tacit.errors import InputError

Loss = Callable[[Any, Any], Tensor]
BatchLoss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor]]


class BatchMean(NamedTuple):
    """The mean loss of a batch, the total weight behind it, and how many units it counts."""

    mean: Tensor
    weight: float
    units: int


Measure = Callable[[nn.Module, Any, Tensor | None], BatchMean]


def from_mean(loss: Loss) -> Measure:
    """Measure batches (inputs, …, target) with a mean-reduced loss(output, target)."""

    def measure(model: nn.Module, batch: Any, weights: Tensor | None) -> BatchMean:
        inputs, target = split(batch)
        output = model(*inputs)
        count = examples(batch)
        if weights is not None:
            # Weights need each example's own loss: the mean-reduced loss of a batch of one.
            return _weighted(_one_by_one(loss, output, target), weights)
        mean = loss(output, target)
        if not isinstance(mean, Tensor) or mean.ndim:
            raise InputError(
                f"loss(output, target) returned {_kind(mean)}: a scalar is needed, the mean over "
                "the batch (reduction='mean'). For one loss an example use "
                "Objective.from_batch_loss."
            )
        return BatchMean(mean, count, count)

    return measure


def from_units(batch_loss: BatchLoss) -> Measure:
    """Measure batches with batch_loss(model, batch): one loss per unit, or (losses, weights)."""

    def measure(model: nn.Module, batch: Any, weights: Tensor | None) -> BatchMean:
        losses = batch_loss(model, batch)
        if isinstance(losses, tuple) and len(losses) == 2 and isinstance(losses[1], Tensor):
            if weights is not None:
                raise InputError(
                    "weights were given twice: by weights= and by batch_loss. Leave one out."
                )
            losses, weights = losses
        if not isinstance(losses, Tensor) or losses.ndim != 1:
            raise InputError(
                f"batch_loss(model, batch) returned {_kind(losses)}: a 1-D tensor is needed, one "
                "loss per example or token (reduction='none', padding left out), so that batches "
                "of different size average exactly."
            )
        if weights is not None:
            return _weighted(losses, weights)
        if losses.dtype.itemsize < 4:
            losses = losses.float()
        mean = losses.mean() if len(losses) else losses.sum()  # padding alone weighs nothing
        return BatchMean(mean, len(losses), len(losses))

    return measure


def _kind(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def split(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """A batch (inputs, …, target) as its inputs and its target."""
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise InputError(
            f"a batch is a {type(batch).__name__}: (inputs, …, target) is needed. For data held "
            "in tensors pass a tuple (X, y); for other batches use Objective.from_batch_loss."
        )
    *inputs, target = batch
    return tuple(inputs), target


def examples(batch: Any) -> int:
    """How many examples a batch (inputs, …, target) holds."""
    inputs, target = split(batch)
    sizes = [len(t) for t in tensors(target) if t.ndim]
    if not sizes:
        raise InputError(
            "the target of a batch holds no tensor with one row an example. Stack targets into a "
            "tensor, or use Objective.from_batch_loss."
        )
    given = [len(t) for t in tensors(inputs) if t.ndim]
    if given and given[0] != sizes[0]:
        raise InputError(
            f"inputs and targets differ in length: {given[0]} and {sizes[0]} in one batch. "
            "Every tensor needs one row an example."
        )
    return sizes[0]


def _one_by_one(loss: Loss, output: Any, target: Any) -> Tensor:
    def alone(output: Any, target: Any) -> Tensor:
        return loss(*(apply(value, lambda t: t.unsqueeze(0)) for value in (output, target)))

    try:
        losses = torch.func.vmap(alone)(output, target)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"the loss cannot be taken of one example at a time, which weights= needs ({error}). "
            "Use Objective.from_batch_loss and return (losses, weights)."
        ) from error
    if losses.ndim != 1:
        raise InputError(
            f"the loss of one example has shape {tuple(losses.shape[1:])}: with weights= the loss "
            "must be mean-reduced to a scalar."
        )
    return losses


def _weighted(losses: Tensor, weights: Tensor) -> BatchMean:
    if weights.shape != losses.shape:
        raise InputError(
            f"weights have shape {tuple(weights.shape)} for losses of shape "
            f"{tuple(losses.shape)}: pass one weight per loss."
        )
    if losses.dtype.itemsize < 4:
        losses = losses.float()
    weights = weights.to(losses)
    if not torch.isfinite(weights).all() or (weights < 0).any():
        raise InputError("weights must be finite and not negative.")
    total = float(weights.double().sum()) if weights.device.type != "mps" else float(weights.sum())
    mean = (weights * losses).sum() / (total or 1.0)
    return BatchMean(mean, total, len(losses))
