"""Columns that depend on the data, for all members of an ensemble of classifiers with dropout."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tacit.ensembles import Ensemble
from tacit.ensembles.data import MemberData, assign_data
from tacit.errors import InputError
from tacit.objective.params import Params
from tacit.regularizers import Columns, Regularizer

ENTRIES = 2**27
"""Largest number of entries of ∂outputs/∂activations, for one layer of all members, at a time."""


def known_regularizer(name: str, column: Params) -> Regularizer:
    """A name for a column that is already computed, which covers the tensors of `column`."""

    def refuse(*_: object) -> Any:
        raise InputError(f"{name} is only a column: use tacit.regularizers to evaluate it.")

    def bind(_: Params) -> Columns:
        return Columns((name,), dict.fromkeys(column, (0,)), refuse)

    return Regularizer(name, bind, refuse)


def dropout_columns(ensemble: Ensemble, data: Any) -> dict[Regularizer, Params]:
    """Columns of the activation-weighted ridge, whole and by layer, and of explicit dropout.

    The weighted ridge is Σ_l Σ_ij W_ij² mean h_j² over the layers whose inputs are dropped, with
    the mean squared activations held constant. Explicit dropout is the regularizer of Wei, Kakade
    & Ma.
    """
    member_data = assign_data(data, len(ensemble), ensemble.first_tensor)
    weighted = _weighted_ridge_column(ensemble, member_data)
    columns = {"weighted_l2": weighted}
    for name, tensor in weighted.items():
        columns[f"weighted_l2[{name.removesuffix('.weight')}]"] = {name: tensor}
    columns["explicit_dropout"] = explicit_column(ensemble, member_data)
    return {known_regularizer(name, column): column for name, column in columns.items()}


def _weighted_ridge_column(ensemble: Ensemble, data: MemberData) -> Params:
    """2 W_ij mean h_j² for the weights of every layer whose inputs are dropped, in float64."""
    layers = pairwise(ensemble.model._modules.items())
    dropped = [f"{name}.weight" for (_, a), (name, _) in layers if isinstance(a, nn.Dropout)]
    moments: dict[str, Any] = dict.fromkeys(dropped, 0.0)
    with torch.no_grad():
        for inputs, _ in data.slices(_examples_per_slice(ensemble, data)):
            _, activations = _outputs_and_activations(ensemble, ensemble.params, inputs)
            for name, h in zip(dropped, activations, strict=True):
                moments[name] = moments[name] + h.double().square().sum(1) / data.examples
    return {n: 2 * ensemble.params[n].double() * m.unsqueeze(1) for n, m in moments.items()}


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
    classes = outputs.shape[-1]
    units = torch.eye(classes, dtype=outputs.dtype, device=outputs.device)
    cotangents = units[:, None, None].expand(classes, *outputs.shape)
    jacobians = torch.autograd.grad(
        outputs, activations, cotangents, create_graph=True, is_grads_batched=True
    )
    probabilities = outputs.softmax(-1).movedim(-1, 0).unsqueeze(-1)
    total = outputs.new_zeros(len(outputs))
    for h, derivatives in zip(activations, jacobians, strict=True):
        mean = (probabilities * derivatives).sum(0)
        variance = (probabilities * (derivatives - mean).square()).sum(0)
        total = total + (h.square() * variance).sum((1, 2)) / (2 * inputs.shape[1])
    return total


def explicit_column(ensemble: Ensemble, data: MemberData) -> Params:
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
