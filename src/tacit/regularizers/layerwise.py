"""A family split by layer: one coefficient for every module that owns parameters."""

from collections.abc import Callable

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.params import Params, layer_of
from tacit.regularizers.family import Columns, Regularizer


def layerwise(family: Regularizer | Callable[[], Regularizer]) -> Regularizer:
    """The family with one strength a layer, named `l2[encoder.0]` and so on.

    A layer is the module that owns the parameters. Only sums over tensors can be split: `l2`,
    `l1`, `smooth_l1`, `distance_to`, `group_l2`, `nuclear_norm`.
    """
    base = family() if callable(family) else family
    if not isinstance(base, Regularizer) or not base.separable:
        raise InputError(
            f"layerwise was given {getattr(base, 'name', type(base).__name__)!r}, which is not a "
            "sum over tensors. Pass l2(), l1(), smooth_l1(beta), distance_to(params), group_l2() "
            "or nuclear_norm()."
        )

    def layers(columns: Columns) -> dict[str, int]:
        return {layer: i for i, layer in enumerate(dict.fromkeys(map(layer_of, columns.active)))}

    def bind(params: Params) -> Columns:
        columns = base.bind(params)
        position = layers(columns)
        return Columns(
            names=tuple(f"{base.name}[{layer}]" for layer in position),
            active={tensor: (position[layer_of(tensor)],) for tensor in columns.active},
            rows=columns.rows,
            kinks=columns.kinks,
        )

    def value(params: Params) -> Tensor:
        columns = base.bind(params)
        members: dict[str, Params] = {layer: {} for layer in layers(columns)}
        for tensor in columns.active:
            members[layer_of(tensor)][tensor] = params[tensor]
        return torch.cat([base.value(own) for own in members.values()])

    return Regularizer(base.name, bind, value, kind=base.kind, entry=base.entry)
