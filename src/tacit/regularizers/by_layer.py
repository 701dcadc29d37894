"""A family that is a sum over tensors, with one strength per layer."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.params import Params, layer_of
from tacit.regularizers.family import Columns, Regularizer


def layerwise(family: Regularizer | Callable[[], Regularizer]) -> Regularizer:
    """The family with one strength per layer, Σ_l λ_l R(θ_l).

    θ_l are the parameters of layer l, that is, of one module without its submodules. Strengths are
    named after the layer, such as `l2[encoder.0]`.

    Trap: only penalties that are sums over tensors can be split: those of single weights (`l2`,
    `l1`, `power`, …), of rows and of matrices. Those of data, `balance`, `diagonal` and `symmetric`
    cannot. Give the scope to the family, as in `layerwise(l2(scope="*.weight"))`.

    >>> import tacit
    >>> params = {"0.weight": torch.ones(2), "2.weight": torch.ones(2)}
    >>> tacit.layerwise(tacit.l2).bind(params).names
    ('l2[0]', 'l2[2]')
    """
    base = family() if callable(family) else family
    if not isinstance(base, Regularizer) or not base.separable:
        raise InputError(
            f"layerwise was given {getattr(base, 'name', type(base).__name__)!r}, not a sum over "
            "tensors. Pass l2(), l1() or another penalty of single weights, rows or matrices."
        )

    def bind(params: Params) -> Columns:
        columns = base.bind(params)
        layers = list(dict.fromkeys(map(layer_of, columns.active)))
        names = tuple(f"{base.name}[{layer}]" for layer in layers)
        active = {n: (layers.index(layer_of(n)),) for n in columns.active}
        functions = columns.functions * len(layers)
        return replace(columns, names=names, active=active, functions=functions)

    def value(params: Params) -> Tensor:
        layers: dict[str, Params] = {}
        for tensor_name in base.bind(params).active:
            layers.setdefault(layer_of(tensor_name), {})[tensor_name] = params[tensor_name]
        return torch.cat([base.value(layer_params) for layer_params in layers.values()])

    split = replace(base, bind=bind, value=value, separable=False)
    if (in_metric := base.in_metric) is not None:
        split = replace(split, in_metric=lambda metric: layerwise(in_metric(metric)))
    if (with_zero_width := base.with_zero_width) is not None:
        split = replace(split, with_zero_width=lambda width: layerwise(with_zero_width(width)))
    return split
