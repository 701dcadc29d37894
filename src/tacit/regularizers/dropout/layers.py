"""The dropout layers of a model, and what enters them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective import derivatives
from tacit.objective.batches import slice_batch, tensors_in
from tacit.objective.borrowing import mode
from tacit.objective.losses import count_examples, split_batch
from tacit.objective.objective import Objective
from tacit.objective.params import shorten
from tacit.objective.randomness import seed_devices

OTHER = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Layers that drop whole channels, or shift what is left."""


class Layer(NamedTuple):
    """A dropout layer's name, and the column that it counts for."""

    name: str
    column: int


class Use(NamedTuple):
    """One call of a dropout layer, and what entered it."""

    layer: Layer
    entered: Tensor


@contextmanager
def watched(layers: Mapping[nn.Module, Layer]) -> Iterator[list[Use]]:
    """Uses of dropout layers while the model runs in eval mode, in their order.

    What enters is copied twice: the layer's own path is told apart from other uses of the same
    tensor, and changes in place before or after it do not reach what is kept.
    """
    uses: list[Use] = []
    fused = torch.backends.mha.get_fastpath_enabled()

    def enter(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise InputError(
                f"dropout layer {layers[module].name!r} runs under no_grad: its Jacobian cannot be "
                "seen. Freeze parameters with requires_grad_(False) instead."
            )
        entered = output.clone()
        if not entered.requires_grad:
            entered.requires_grad_()
        uses.append(Use(layers[module], entered))
        return entered.clone()

    handles = [module.register_forward_hook(enter) for module in layers]
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it runs past a frozen encoder's modules
        yield uses
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for handle in handles:
            handle.remove()


@torch.inference_mode(mode=False)
def dropout_layers(objective: Objective, *, by_layer: bool) -> dict[nn.Module, Layer]:
    """The model's dropout layers; refused where they are not all of its randomness."""
    kinds = (nn.Dropout, *OTHER)
    active = {n: m for n, m in objective.model.named_modules() if isinstance(m, kinds) and m.p > 0}
    other = [
        f"{n} ({type(m).__name__})"
        for n, m in active.items()
        if isinstance(m, OTHER) or type(m).forward is not nn.Dropout.forward
    ]
    if other:
        raise InputError(
            f"explicit_dropout is for nn.Dropout, which drops every entry alone; here are "
            f"{shorten(other)}. Put nn.Dropout in their place, or set their p to 0."
        )
    layers: dict[nn.Module, Layer] = {
        m: Layer(n, i if by_layer else 0) for i, (n, m) in enumerate(active.items())
    }
    uses: list[Use] = []

    def probe(model: nn.Module, batch: Any, weights: Tensor | None, index: int) -> None:
        count = count_examples(batch)
        # Half of them tells rows of examples from a dimension that happens to be as long.
        for part in {count, max(count // 2, min(count, 2))}:
            with watched(layers) as seen:
                run(model, slice_batch(batch, slice(part), count), seen)
            uses.extend(seen)
        _check_no_other_randomness(model, batch, layers)

    objective.for_each_batch(derivatives.leaves(objective.params), probe, first=True)
    if not uses:
        raise InputError(
            f"{type(objective.model).__name__} runs through no dropout layer: explicit_dropout "
            "needs at least one nn.Dropout with p > 0. F.dropout and the like cannot be seen."
        )
    return layers


def run(model: nn.Module, batch: Any, uses: list[Use]) -> tuple[Tensor, Any]:
    """What the model makes of a batch, and its target; refused unless examples are rows."""
    inputs, target = split_batch(batch)
    outputs, count = model(*inputs), count_examples(batch)
    if not isinstance(outputs, Tensor) or not outputs.ndim or len(outputs) != count:
        kind = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs)
        raise InputError(
            f"the model gave {kind} for {count} examples: explicit_dropout needs one tensor with a "
            "row an example. Wrap the model in a module that returns such a tensor."
        )
    for layer, entered in uses:
        if not entered.ndim or len(entered) != count:
            raise InputError(
                f"dropout layer {layer.name!r} is entered by shape {tuple(entered.shape)} for "
                f"{count} examples: explicit_dropout needs a row an example there, as with "
                "batch_first=True."
            )
    return outputs, target


@contextmanager
def _counted(layers: Iterable[nn.Module]) -> Iterator[Counter[nn.Module]]:
    """How often each layer is called meanwhile."""
    calls: Counter[nn.Module] = Counter()
    handles = [
        layer.register_forward_pre_hook(lambda module, _: calls.update([module]))
        for layer in layers
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _check_no_other_randomness(model: nn.Module, batch: Any, layers: Iterable[nn.Module]) -> None:
    """Refuse a model that training makes random even with its dropout layers off."""
    inputs, found, layers = split_batch(batch)[0], [], list(layers)
    with torch.no_grad(), _counted(layers) as usual:
        model(*inputs)
    with mode(model, training=True), torch.no_grad(), _counted(layers) as calls:
        for layer in layers:
            layer.training = False
        for seed in (0, 1):
            seed_devices(seed, {t.device for t in tensors_in(inputs)})
            found.append([t for t in tensors_in(model(*inputs)) if t.is_floating_point()])
    if any(calls[layer] != 2 * usual[layer] for layer in layers):
        raise InputError(
            "a dropout layer is run another number of times in training than in eval mode, as "
            "behind 'if self.training': explicit_dropout looks at eval mode. Call the layer in "
            "both; in eval mode it does nothing."
        )
    for a, b in zip(*found, strict=True):
        slack = torch.finfo(a.dtype).eps ** 0.5 * float(a.abs().max())
        if a.shape != b.shape or not torch.allclose(a, b, rtol=0, atol=slack):
            raise InputError(
                "in training the model is random even with its nn.Dropout layers off: F.dropout, "
                "dropout inside attention or between recurrent layers, noise. explicit_dropout "
                "cannot see it: use nn.Dropout modules, or set those rates to 0."
            )
