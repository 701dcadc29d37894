"""The dropout layers of a model, and their inputs while the model runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.batches import slice_batch, tensors_in
from tacit.objective.borrowing import temporary_mode
from tacit.objective.losses import count_examples, split_batch
from tacit.objective.objective import Objective
from tacit.objective.params import shorten
from tacit.objective.randomness import seed_devices

UNSUPPORTED_DROPOUT = (
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
"""Layers that drop whole channels, or that shift and rescale the remaining entries."""


class DropoutLayer(NamedTuple):
    """A dropout layer's name in the model, and the column (strength) that it contributes to."""

    name: str
    column: int


class LayerCall(NamedTuple):
    """One call of a dropout layer, and its input h."""

    layer: DropoutLayer
    input: Tensor


@contextmanager
def record_dropout_inputs(
    layers: Mapping[nn.Module, DropoutLayer],
) -> Iterator[list[LayerCall]]:
    """Record the calls of dropout layers, in order, while the model runs in eval mode.

    The input is cloned twice. The first clone separates the path through the layer from other uses
    of the same tensor; the second protects the recorded tensor from in-place operations that follow
    the layer.
    """
    calls: list[LayerCall] = []

    def record(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise InputError(
                f"dropout layer {layers[module].name!r} runs under no_grad: the Jacobian of the "
                "outputs by its input cannot be computed. Freeze parameters with "
                "requires_grad_(False) instead."
            )
        recorded = output.clone()  # in eval mode the output of a dropout layer is its input
        if not recorded.requires_grad:
            recorded.requires_grad_()
        calls.append(LayerCall(layers[module], recorded))
        return recorded.clone()

    handles = [module.register_forward_hook(record) for module in layers]
    try:
        with derivatives.math_attention():
            yield calls
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode(mode=False)
def dropout_layers(objective: Objective, *, by_layer: bool) -> dict[nn.Module, DropoutLayer]:
    """The model's dropout layers with p > 0; refused unless they are all of its randomness."""
    supported_or_not = (nn.Dropout, *UNSUPPORTED_DROPOUT)
    active = {
        name: module
        for name, module in objective.model.named_modules()
        if isinstance(module, supported_or_not) and module.p > 0
    }
    unsupported = [
        f"{name} ({type(module).__name__})"
        for name, module in active.items()
        if isinstance(module, UNSUPPORTED_DROPOUT) or type(module).forward is not nn.Dropout.forward
    ]
    if unsupported:
        raise InputError(
            "explicit_dropout supports only nn.Dropout, which drops every entry independently; "
            f"this model has {shorten(unsupported)}. Replace them by nn.Dropout, or set their p "
            "to 0."
        )
    layers: dict[nn.Module, DropoutLayer] = {
        module: DropoutLayer(name, i if by_layer else 0)
        for i, (name, module) in enumerate(active.items())
    }
    recorded: list[LayerCall] = []

    def record(model: nn.Module, batch: Any, weights: Tensor | None, index: int) -> None:
        count = count_examples(batch)
        # A second run with half of the examples shows whether the first dimension of an input is
        # the examples, or another dimension that happens to have the same length.
        for size in {count, max(count // 2, min(count, 2))}:
            with record_dropout_inputs(layers) as calls:
                run_batch(model, slice_batch(batch, slice(size), count), calls)
            recorded.extend(calls)
        _check_no_other_randomness(model, batch, layers)

    objective.for_each_batch(derivatives.leaves(objective.params), record, probe=True)
    if not recorded:
        raise InputError(
            f"{type(objective.model).__name__} runs through no dropout layer: explicit_dropout "
            "needs at least one nn.Dropout with p > 0. It cannot detect F.dropout: use nn.Dropout "
            "modules."
        )
    return layers


def run_batch(model: nn.Module, batch: Any, calls: list[LayerCall]) -> tuple[Tensor, Any]:
    """The model's outputs for a batch, and the batch's target.

    Refused unless the outputs, and the inputs of all recorded `calls`, have one row per example.
    """
    inputs, target = split_batch(batch)
    outputs, count = model(*inputs), count_examples(batch)
    if not isinstance(outputs, Tensor) or not outputs.ndim or len(outputs) != count:
        kind = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs)
        raise InputError(
            f"the model returned {kind} for {count} examples: explicit_dropout needs one tensor "
            "with one row per example. Wrap the model in a module that returns such a tensor."
        )
    for layer, h in calls:
        if not h.ndim or len(h) != count:
            raise InputError(
                f"dropout layer {layer.name!r} has an input of shape {tuple(h.shape)} for {count} "
                "examples: explicit_dropout needs one row per example there. Put the examples "
                "first, as with batch_first=True."
            )
    return outputs, target


@contextmanager
def _count_calls(layers: Iterable[nn.Module]) -> Iterator[Counter[nn.Module]]:
    """Count the calls of each layer inside the context."""
    counts: Counter[nn.Module] = Counter()
    handles = [
        layer.register_forward_pre_hook(lambda module, _: counts.update([module]))
        for layer in layers
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _check_no_other_randomness(model: nn.Module, batch: Any, layers: Iterable[nn.Module]) -> None:
    """Refuse a model that is random in training mode even with its dropout layers off."""
    inputs, layers = split_batch(batch)[0], list(layers)
    outputs = []
    with torch.no_grad(), _count_calls(layers) as eval_calls:
        model(*inputs)
    with (
        temporary_mode(model, training=True),
        torch.no_grad(),
        _count_calls(layers) as training_calls,
    ):
        for layer in layers:
            layer.training = False
        for seed in (0, 1):
            seed_devices(seed, {t.device for t in tensors_in(inputs)})
            outputs.append([t for t in tensors_in(model(*inputs)) if t.is_floating_point()])
    if any(training_calls[layer] != 2 * eval_calls[layer] for layer in layers):
        raise InputError(
            "a dropout layer runs a different number of times in training and in eval mode, as "
            "behind 'if self.training': explicit_dropout records eval mode. Call the layer in both "
            "modes; in eval mode it does nothing."
        )
    for a, b in zip(*outputs, strict=True):
        tolerance = torch.finfo(a.dtype).eps ** 0.5 * float(a.abs().max())
        if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=tolerance):
            raise InputError(
                "in training mode the model is random even with its nn.Dropout layers off: "
                "F.dropout, dropout inside attention or between recurrent layers, or noise. "
                "explicit_dropout cannot record these: use nn.Dropout modules, or set those rates "
                "to 0."
            )
