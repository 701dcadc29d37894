"""Columns that depend on the data, for all members of an ensemble of classifiers with dropout."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.ensembles import Ensemble
from tacit.ensembles.data import MemberData, assign_data
from tacit.errors import InputError
from tacit.objective.params import Params
from tacit.regularizers import Columns, Regularizer

ENTRIES = 2**27
"""Largest number of entries of ∂outputs/∂activations, for one layer of all members, at a time."""


class KnownColumns(NamedTuple):
    """Regularizers with one strength each, and their stacked columns."""

    regularizers: list[Regularizer]
    columns: dict[Regularizer, Params]


def known_regularizer(name: str, column: Params) -> Regularizer:
    """A name for a column that is already computed, which covers the tensors of `column`."""

    def refuse(*_: object) -> Any:
        raise InputError(
            f"{name} has no value or gradient to evaluate, only a column that was computed before: "
            "use tacit.regularizers to train with it."
        )

    def bind(_: Params) -> Columns:
        return Columns((name,), dict.fromkeys(column, (0,)), refuse)

    return Regularizer(name, bind, refuse)


def dropout_columns(ensemble: Ensemble, data: Any) -> KnownColumns:
    """Columns of the activation-weighted ridge, whole and by layer, and of explicit dropout.

    The weighted ridge is Σ_l Σ_ij W_ij² mean h_j² over the layers whose inputs are dropped, with
    the mean squared activations held constant. Explicit dropout is the regularizer of Wei, Kakade
    & Ma.
    """
    member_data = assign_data(data, len(ensemble), ensemble.first_tensor)
    weighted = _weighted_ridge_column(ensemble, member_data)
    columns = {known_regularizer("weighted_l2", weighted): weighted}
    for name, tensor in weighted.items():
        layer = {name: tensor}
        columns[known_regularizer(f"weighted_l2[{name.removesuffix('.weight')}]", layer)] = layer
    explicit = _explicit_column(ensemble, member_data)
    columns[known_regularizer("explicit_dropout", explicit)] = explicit
    return KnownColumns(list(columns), columns)


def _weighted_ridge_column(ensemble: Ensemble, data: MemberData) -> Params:
    """2 W_ij mean h_j² for the weights of every layer whose inputs are dropped, in float64."""
    moments: list[Tensor] = []
    with torch.no_grad():
        for inputs, _ in data.slices(_examples_per_slice(ensemble, data)):
            _, activations = _outputs_and_activations(ensemble, ensemble.params, inputs)
            parts = [h.double().square().sum(1) / data.examples for h in activations]
            moments = [a + b for a, b in zip(moments, parts, strict=True)] if moments else parts
    return {
        name: 2 * ensemble.params[name].double() * moment.unsqueeze(1)
        for name, moment in zip(_weights_after_dropout(ensemble), moments, strict=True)
    }


def _weights_after_dropout(ensemble: Ensemble) -> list[str]:
    """Names of the weights of the linear layers that follow dropout layers, in order."""
    names, after_dropout = [], False
    for name, module in ensemble.model._modules.items():
        if isinstance(module, torch.nn.Dropout):
            after_dropout = True
        elif isinstance(module, torch.nn.Linear):
            names += [f"{name}.weight"] if after_dropout else []
            after_dropout = False
    return names


def _outputs_and_activations(
    ensemble: Ensemble, params: Params, inputs: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all members without dropout, and the inputs of every dropout layer."""
    activations: list[Tensor] = []

    def record(x: Tensor, _: float) -> Tensor:
        activations.append(x)
        return x

    return ensemble.forward(params, inputs, record), activations


def explicit_penalty(ensemble: Ensemble, params: Params, inputs: Tensor) -> Tensor:
    """½ Σ_l mean_i ⟨J_lᵀ H J_l, diag h_l²⟩ of cross-entropy, one value per member.

    J_l = ∂outputs/∂h_l, and H = diag p − ppᵀ is the Hessian of cross-entropy in the outputs. Entry
    j of the diagonal of JᵀHJ is Σ_k p_k J_kj² − (Σ_k p_k J_kj)²: the variance of ∂output_k/∂h_j
    over classes k drawn with probabilities p.
    """
    outputs, activations = _outputs_and_activations(ensemble, params, inputs)
    probabilities = outputs.softmax(-1)
    jacobians = [
        torch.autograd.grad(outputs[..., k].sum(), activations, create_graph=True)
        for k in range(outputs.shape[-1])
    ]
    total = outputs.new_zeros(len(outputs))
    for layer, h in enumerate(activations):
        derivatives = [jacobian[layer] for jacobian in jacobians]
        mean = sum(
            (probabilities[..., k : k + 1] * d for k, d in enumerate(derivatives)),
            torch.zeros_like(h),
        )
        variance = torch.zeros_like(h)
        for k, derivative in enumerate(derivatives):
            variance = variance + probabilities[..., k : k + 1] * (derivative - mean).square()
        total = total + (h.square() * variance).sum((1, 2)) / (2 * inputs.shape[1])
    return total


def _explicit_column(ensemble: Ensemble, data: MemberData) -> Params:
    """The gradient of `explicit_penalty` over all data, summed in float64."""
    sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in ensemble.params.items()}
    for inputs, _ in data.slices(_examples_per_slice(ensemble, data)):
        leaves = {n: p.detach().requires_grad_() for n, p in ensemble.params.items()}
        with torch.enable_grad():
            value = explicit_penalty(ensemble, leaves, inputs).sum()
            gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total.add_(gradient, alpha=inputs.shape[1] / data.examples)
    return sums


def _examples_per_slice(ensemble: Ensemble, data: MemberData) -> int:
    """Number of examples at a time whose ∂outputs/∂activations fit into `ENTRIES`."""
    widest = max(p.shape[1] for p in ensemble.params.values())
    outputs = next(reversed(ensemble.params.values())).shape[1]
    entries = ENTRIES if data.inputs.device.type == "cuda" else ENTRIES // 16
    return max(1, entries // (widest * outputs * len(data.assignment)))
