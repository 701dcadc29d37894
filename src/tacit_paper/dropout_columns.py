"""Columns that depend on the data, for all members of an ensemble of classifiers with dropout."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.ensembles import Ensemble
from tacit.ensembles.data import Owned, own_data
from tacit.errors import InputError
from tacit.objective.params import Params
from tacit.regularizers import Columns, Regularizer

ENTRIES = 2**27
"""Entries of ∂outputs/∂activations of one layer, of all members, that are held at once."""


class Given(NamedTuple):
    """Families of one coefficient with their stacked columns."""

    regularizers: list[Regularizer]
    columns: dict[Regularizer, Params]


def given(name: str, column: Params) -> Regularizer:
    """A regularizer in name alone, whose column is known on the tensors given."""

    def missing(*_: object) -> Any:
        raise InputError(f"{name} is known by its columns alone: it has no value to train with.")

    def bind(_: Params) -> Columns:
        return Columns((name,), dict.fromkeys(column, (0,)), missing)

    return Regularizer(name, bind, missing)


def dropout_columns(ensemble: Ensemble, data: Any) -> Given:
    """Ridge weighted by the activations that dropout acts on, whole and by layer; and Wei et al.'s.

    The weighted ridge is Σ_l Σ_ij W_ij² mean h_j² over layers whose inputs are dropped, its
    weights held fixed.
    """
    owned = own_data(data, len(ensemble), ensemble.first)
    weighted = _weighted(ensemble, owned)
    every = given("weighted_l2", weighted)
    found = {every: weighted}
    for name, column in weighted.items():
        found[given(f"weighted_l2[{name.removesuffix('.weight')}]", {name: column})] = {
            name: column
        }
    explicit = explicit_column(ensemble, owned)
    found[given("explicit_dropout", explicit)] = explicit
    return Given(list(found), found)


def _weighted(ensemble: Ensemble, data: Owned) -> Params:
    """2 W_ij mean h_j² for every weight behind a dropout layer, in float64."""
    moments: list[Tensor] = []
    layers = _behind(ensemble)
    with torch.no_grad():
        for inputs, _ in data.slices(_slice(ensemble, data)):
            held = activations(ensemble, ensemble.params, inputs)[1]
            parts = [h.double().square().sum(1) / data.examples for h in held]
            moments = [a + b for a, b in zip(moments, parts, strict=True)] if moments else parts
    return {
        name: 2 * ensemble.params[name].double() * moment.unsqueeze(1)
        for name, moment in zip(layers, moments, strict=True)
    }


def _behind(ensemble: Ensemble) -> list[str]:
    """Weights of the linear layers that follow dropout layers, in order."""
    found, waiting = [], False
    for name, module in ensemble.model._modules.items():
        if isinstance(module, torch.nn.Dropout):
            waiting = True
        elif isinstance(module, torch.nn.Linear):
            found += [f"{name}.weight"] if waiting else []
            waiting = False
    return found


def activations(ensemble: Ensemble, params: Params, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all members without dropout, and what enters each dropout layer."""
    held: list[Tensor] = []

    def record(x: Tensor, _: float) -> Tensor:
        held.append(x)
        return x

    return ensemble.forward(params, inputs, record), held


def explicit_penalty(ensemble: Ensemble, params: Params, inputs: Tensor) -> Tensor:
    """½ Σ_l mean_i ⟨J_lᵀ H J_l, diag h_l²⟩ of cross-entropy, one value a member.

    With H = diag p − ppᵀ the inner product of unit j is h_j² times the variance over classes,
    drawn with probabilities p, of ∂output/∂h_j.
    """
    outputs, held = activations(ensemble, params, inputs)
    chances = outputs.softmax(-1)
    parts = [
        torch.autograd.grad(outputs[..., k].sum(), held, create_graph=True)
        for k in range(outputs.shape[-1])
    ]
    total = outputs.new_zeros(len(outputs))
    for layer, h in enumerate(held):
        slopes: Sequence[Tensor] = [part[layer] for part in parts]
        mean = sum((chances[..., k : k + 1] * s for k, s in enumerate(slopes)), torch.zeros_like(h))
        variance = torch.zeros_like(h)
        for k, slope in enumerate(slopes):
            variance = variance + chances[..., k : k + 1] * (slope - mean).square()
        total = total + (h.square() * variance).sum((1, 2)) / (2 * inputs.shape[1])
    return total


def explicit_column(ensemble: Ensemble, data: Owned) -> Params:
    """The gradient of `explicit_penalty` over all data, in float64."""
    sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in ensemble.params.items()}
    for inputs, _ in data.slices(_slice(ensemble, data)):
        leaves = {n: p.detach().requires_grad_() for n, p in ensemble.params.items()}
        with torch.enable_grad():
            value = explicit_penalty(ensemble, leaves, inputs).sum()
            slopes = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        for total, slope in zip(sums.values(), slopes, strict=True):
            total.add_(slope, alpha=inputs.shape[1] / data.examples)
    return sums


def _slice(ensemble: Ensemble, data: Owned) -> int:
    widest = max(p.shape[1] for p in ensemble.params.values())
    outputs = next(reversed(ensemble.params.values())).shape[1]
    entries = ENTRIES if data.inputs.device.type == "cuda" else ENTRIES // 16
    return max(1, entries // (widest * outputs * len(data.owner)))
