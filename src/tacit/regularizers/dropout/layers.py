"""The dropout layers of a model, and their inputs while the model runs."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.batches import slice_batch, tensors_in
from tacit.objective.borrowing import temporary_mode
from tacit.objective.losses import count_examples, split_batch
from tacit.objective.models import named_modules
from tacit.objective.objective import Objective
from tacit.objective.params import shorten
from tacit.objective.randomness import seed_devices


class DropoutLayer(NamedTuple):
    """A dropout layer's name in the model, and the column (strength) that it contributes to."""

    name: str
    column: int


class LayerCall(NamedTuple):
    """One call of a dropout layer, and its input h."""

    layer: DropoutLayer
    input: Tensor


@contextmanager
def record_inputs(layers: Mapping[nn.Module, DropoutLayer]) -> Iterator[list[LayerCall]]:
    """Record the calls of dropout layers, in order, while the model runs in eval mode.

    The input is cloned twice. The first clone separates the path through the layer from other uses
    of the same tensor; the second protects the recorded tensor from in-place operations that follow
    the layer.
    """
    calls: list[LayerCall] = []

    def record(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise InputError(
                f"dropout layer {layers[module].name!r} runs under no_grad, where it has no "
                "Jacobian. Freeze parameters with requires_grad_(False) instead."
            )
        recorded = output.clone()  # in eval mode the output of a dropout layer is its input
        recorded.requires_grad_()
        calls.append(LayerCall(layers[module], recorded))
        return recorded.clone()

    with ExitStack() as hooks, derivatives.math_attention():
        for module in layers:
            hooks.enter_context(module.register_forward_hook(record))
        yield calls


@torch.inference_mode(mode=False)
def dropout_layers(
    objective: Objective, *, by_layer: bool, name: str = "explicit_dropout"
) -> dict[nn.Module, DropoutLayer]:
    """The model's dropout layers with p > 0; refused unless they are all of its randomness."""
    active = {
        layer: module
        for layer, module in named_modules(objective.model).items()
        if isinstance(module, _DropoutNd) and module.p > 0
    }
    unsupported = [
        f"{layer} ({type(module).__name__})"
        for layer, module in active.items()
        if type(module).forward is not nn.Dropout.forward
    ]
    if unsupported:
        raise InputError(
            f"{name} needs nn.Dropout, which drops every entry independently; this model "
            f"has {shorten(unsupported)}. Replace them by nn.Dropout, or set their p to 0."
        )
    layers: dict[nn.Module, DropoutLayer] = {
        module: DropoutLayer(layer, i if by_layer else 0)
        for i, (layer, module) in enumerate(active.items())
    }
    calls_by_size: dict[int, list[LayerCall]] = {}

    def record(model: nn.Module, batch: Any, weights: Tensor | None, index: int) -> None:
        count = count_examples(batch)
        # A second run with half of the examples shows whether the first dimension of an input is
        # the examples, or another dimension that happens to have the same length.
        for size in {count, max(count // 2, min(count, 2))}:
            with record_inputs(layers) as calls:
                run_batch(model, slice_batch(batch, slice(size), count), calls)
            calls_by_size[size] = calls
        _check_no_other_randomness(model, batch, layers, calls_by_size[count])

    objective.for_each_batch(derivatives.leaves(objective.point()), record, probe=True)
    if not any(calls_by_size.values()):
        raise InputError(
            f"{type(objective.model).__name__} runs through no dropout layer: {name} "
            "needs an nn.Dropout with p > 0, and cannot detect F.dropout. Use nn.Dropout modules."
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
                "examples, not one row for each. Put the examples first, as with batch_first=True."
            )
    return outputs, target


def _check_no_other_randomness(
    model: nn.Module, batch: Any, layers: Mapping[nn.Module, DropoutLayer], calls: list[LayerCall]
) -> None:
    """Refuse a model that is random in training mode even with its dropout layers off.

    Also refused unless every layer runs as often as in its recorded calls in eval mode.
    """
    (inputs, _), outputs = split_batch(batch), []
    times: Counter[DropoutLayer] = Counter()
    with ExitStack() as hooks, temporary_mode(model, training=True), torch.no_grad():
        for module in layers:
            module.training = False
            hook = module.register_forward_pre_hook(lambda m, _: times.update([layers[m]]))
            hooks.enter_context(hook)
        for seed in (0, 1):
            seed_devices(seed, {t.device for t in tensors_in(inputs)})
            outputs.append([t for t in tensors_in(model(*inputs)) if t.is_floating_point()])
    if times != Counter(2 * [call.layer for call in calls]):
        raise InputError(
            "a dropout layer runs a different number of times in training and in eval mode, as "
            "behind 'if self.training'. Call it in both modes; in eval mode it does nothing."
        )
    for a, b in zip(*outputs, strict=True):
        tolerance = torch.finfo(a.dtype).eps ** 0.5 * float(a.abs().max())
        if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=tolerance):
            raise InputError(
                "in training mode the model is random even with its nn.Dropout layers off: "
                "F.dropout, dropout inside attention or between recurrent layers, or noise. "
                "Use nn.Dropout modules instead, or set those rates to 0."
            )
