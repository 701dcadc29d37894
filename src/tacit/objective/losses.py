"""How the loss of a batch becomes one mean, the weight it stands for, and a count of units."""

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
    """The mean loss of a batch, the total weight behind it, and how many units it counts."""

    mean: Tensor
    weight: float
    units: int


Measure = Callable[[nn.Module, Any, Tensor | None, Noise | None], BatchMean]


class Spread(NamedTuple):
    """A batch unit by unit: D ℓ_i = Σ ⟨pull_i, D output_i⟩ over its outputs, one row a unit."""

    outputs: tuple[Tensor, ...]
    pulls: tuple[Tensor, ...]
    """∂ℓ_i/∂output_i, held constant."""
    bend: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]
    """∂²ℓ_i/∂output_i² times a direction of the outputs."""
    weights: Tensor | None
    units: int


Spreader = Callable[[nn.Module, Any, Tensor | None, Noise | None], Spread]


def from_mean(loss: Loss) -> Measure:
    """Measure batches (inputs, …, target) with a mean-reduced loss(output, target)."""

    def measure(model: nn.Module, batch: Any, weights: Tensor | None, _: Any) -> BatchMean:
        inputs, target = split_batch(batch)
        output = model(*inputs)
        count = count_examples(batch)
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

    def measure(
        model: nn.Module, batch: Any, weights: Tensor | None, noise: Noise | None
    ) -> BatchMean:
        losses, weights = _unit_losses(batch_loss, model, batch, weights, noise)
        if weights is not None:
            return _weighted(losses, weights)
        if losses.dtype.itemsize < 4:
            losses = losses.float()
        mean = losses.mean() if len(losses) else losses.sum()  # padding alone weighs nothing
        return BatchMean(mean, len(losses), len(losses))

    return measure


def spread_mean(loss: Loss) -> Spreader:
    """Examples of batches with a mean-reduced loss: n times its slope has each example's own."""

    def spread(model: nn.Module, batch: Any, weights: Tensor | None, _: Any) -> Spread:
        inputs, target = split_batch(batch)
        outputs, count = model(*inputs), count_examples(batch)
        held, fresh = [], []

        def cut_off(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            held.append(tensor)
            fresh.append(tensor.detach().requires_grad_())
            return fresh[-1]

        with torch.enable_grad():
            mean = loss(map_tensors(outputs, cut_off), target)
            if not fresh or not mean.requires_grad:
                raise InputError(
                    "the loss of single examples cannot be told from the model's output: no tensor "
                    "in it reaches the loss. Use Objective.from_batch_loss."
                )
            slopes = torch.autograd.grad(count * mean, fresh, create_graph=True, allow_unused=True)
        used = [i for i, slope in enumerate(slopes) if slope is not None and slope.any()]
        if not used:  # a batch that is fitted exactly pulls nowhere, but has its examples
            rows = [i for i, h in enumerate(held) if h.ndim and len(h) == count]
            used = [i for i in rows if slopes[i] is not None][:1]
        for i in used:
            if not held[i].ndim or len(held[i]) != count:
                raise InputError(
                    f"the model gave shape {tuple(held[i].shape)} for {count} examples: the loss "
                    "of single examples needs a row an example. Use Objective.from_batch_loss."
                )
        bend = _bend([slopes[i] for i in used], [fresh[i] for i in used])
        pulls = tuple(slopes[i].detach() for i in used)
        return Spread(tuple(held[i] for i in used), pulls, bend, weights, count)

    return spread


def spread_units(batch_loss: BatchLoss) -> Spreader:
    """Units of batches with batch_loss(model, batch)."""

    def spread(model: nn.Module, batch: Any, weights: Tensor | None, noise: Noise | None) -> Spread:
        losses, weights = _unit_losses(batch_loss, model, batch, weights, noise)
        if weights is not None:
            _weighted(losses.detach(), weights)  # refuses what are no weights
        ones = torch.ones_like(losses, requires_grad=False)
        return Spread((losses,), (ones,), lambda along: [None], weights, len(losses))

    return spread


def _bend(
    slopes: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], Sequence[Tensor | None]]:
    """The Hessian of the loss by the outputs, as a product: each example meets its own."""

    def product(along: Sequence[Tensor]) -> Sequence[Tensor | None]:
        pairs = [(s, a) for s, a in zip(slopes, along, strict=True) if s.requires_grad]
        if not pairs:  # the loss is linear in the outputs
            return [None] * len(outputs)
        curved, directions = zip(*pairs, strict=True)
        return torch.autograd.grad(
            curved, list(outputs), directions, retain_graph=True, allow_unused=True
        )

    return product


def _unit_losses(
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
            f"batch_loss(model, batch) returned {_kind(losses)}: a 1-D tensor is needed, one "
            "loss per example or token (reduction='none', padding left out), so that batches "
            "of different size average exactly."
        )
    return losses, weights


def _kind(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def split_batch(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """A batch (inputs, …, target) as its inputs and its target."""
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise InputError(
            f"a batch is a {type(batch).__name__}: (inputs, …, target) is needed. For data held "
            "in tensors pass a tuple (X, y); for other batches use Objective.from_batch_loss."
        )
    *inputs, target = batch
    return tuple(inputs), target


def count_examples(batch: Any) -> int:
    """How many examples a batch (inputs, …, target) holds."""
    inputs, target = split_batch(batch)
    sizes = [len(t) for t in tensors_in(target) if t.ndim]
    if not sizes:
        raise InputError(
            "the target of a batch holds no tensor with one row an example. Stack targets into a "
            "tensor, or use Objective.from_batch_loss."
        )
    given = [len(t) for t in tensors_in(inputs) if t.ndim]
    if given and given[0] != sizes[0]:
        raise InputError(
            f"inputs and targets differ in length: {given[0]} and {sizes[0]} in one batch. "
            "Every tensor needs one row an example."
        )
    return sizes[0]


def _one_by_one(loss: Loss, output: Any, target: Any) -> Tensor:
    def alone(output: Any, target: Any) -> Tensor:
        return loss(*(map_tensors(value, lambda t: t.unsqueeze(0)) for value in (output, target)))

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
