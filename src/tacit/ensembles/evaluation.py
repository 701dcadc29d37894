"""Losses and gradients of all members, over all their data or on one batch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.checks import check_ensemble, check_member_loss
from tacit.ensembles.data import MemberData, assign_data
from tacit.ensembles.forward import DropoutFunction
from tacit.ensembles.members import Ensemble
from tacit.objective.losses import Loss
from tacit.objective.params import Params

ACTIVATION_ENTRIES = 2**22
"""Largest number of entries, over all members, of one layer's activations on a CPU."""


class LossGradients(NamedTuple):
    """Mean losses of all members, (members), and their stacked gradients."""

    losses: Tensor
    gradients: Params


def gradients(ensemble: Ensemble, loss: Loss, data: Any) -> LossGradients:
    """L and ∇L of every member over all its examples, in float64 and without dropout."""
    check_ensemble(ensemble)
    ensemble = ensemble.to(torch.float64)
    data = assign_data(data, len(ensemble), ensemble.first_tensor)
    check_member_loss(ensemble, loss, data)
    return mean_gradients(ensemble, loss, data)


def mean_gradients(
    ensemble: Ensemble,
    loss: Loss,
    data: MemberData,
    apply_dropout: DropoutFunction | None = None,
) -> LossGradients:
    """L and ∇L over all examples, computed in the ensemble's dtype and summed in float64."""
    losses = ensemble.first_tensor.new_zeros(len(ensemble), dtype=torch.float64)
    sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in ensemble.params.items()}
    for inputs, targets in data.slices(slice_size(ensemble.params, data)):
        fraction = inputs.shape[1] / data.examples
        batch = batch_gradients(ensemble, loss, inputs, targets, apply_dropout)
        losses.add_(batch.losses, alpha=fraction)
        for name, gradient in batch.gradients.items():
            sums[name].add_(gradient, alpha=fraction)
    return LossGradients(losses, sums)


def batch_gradients(
    ensemble: Ensemble,
    loss: Loss,
    inputs: Tensor,
    targets: Tensor,
    apply_dropout: DropoutFunction | None = None,
) -> LossGradients:
    """L and ∇L of every member on one batch (members, examples, …), by default without dropout."""
    leaves = {n: p.detach().requires_grad_() for n, p in ensemble.params.items()}
    with torch.enable_grad():
        losses = vmap(loss)(ensemble.forward(leaves, inputs, apply_dropout), targets)
        tensors = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return LossGradients(losses.detach(), dict(zip(leaves, tensors, strict=True)))


def mean_loss(ensemble: Ensemble, loss: Loss, data: MemberData) -> Tensor:
    """The loss of every member over all its examples, without dropout."""
    losses, total = vmap(loss), ensemble.first_tensor.new_zeros(len(ensemble))
    with torch.no_grad():
        for inputs, targets in data.slices(slice_size(ensemble.params, data)):
            outputs = ensemble.forward(ensemble.params, inputs, None)
            total.add_(losses(outputs, targets), alpha=inputs.shape[1] / data.examples)
    return total


def slice_size(params: Params, data: MemberData) -> int:
    """Number of examples to evaluate at once.

    Activations then fit into memory and, on a CPU, roughly into its caches.
    """
    widest = max(data.inputs[0, 0].numel(), *(max((1, *p.shape[1:2])) for p in params.values()))
    on_cpu = data.inputs.device.type == "cpu"
    entries = ACTIVATION_ENTRIES if on_cpu else 2**6 * ACTIVATION_ENTRIES
    return max(1, entries // (widest * len(data.assignment)))
