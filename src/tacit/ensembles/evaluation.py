"""Losses and gradients of all members, over all their data or on one batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.checks import prepare
from tacit.ensembles.data import MemberData
from tacit.ensembles.forward import DropoutFunction
from tacit.ensembles.members import Ensemble
from tacit.objective.derivatives import leaves
from tacit.objective.losses import Loss
from tacit.objective.params import Params, float64_zeros

ACTIVATION_ENTRIES = 2**22
"""Largest number of entries, over all members, of one layer's activations on a CPU."""


class LossGradients(NamedTuple):
    """Mean losses of all members, (members), and their stacked gradients."""

    losses: Tensor
    gradients: Params


class Derivatives(NamedTuple):
    """Values of all members, their stacked gradients, and what they do not depend on."""

    losses: Tensor
    gradients: Params
    unreached: frozenset[str]
    """Parameters that the values do not depend on, the same in all members."""


def gradients(ensemble: Ensemble, loss: Loss, data: Any) -> LossGradients:
    """L and ∇L of every member over all its examples, in float64 and without dropout."""
    ensemble, data = prepare(ensemble, loss, data, torch.float64)
    losses, stacked, _ = mean_gradients(ensemble, loss, data)
    return LossGradients(losses, stacked)


def mean_gradients(
    ensemble: Ensemble,
    loss: Loss,
    data: MemberData,
    apply_dropout: DropoutFunction | None = None,
) -> Derivatives:
    """L and ∇L over all examples, computed in the ensemble's dtype and summed in float64."""
    losses = ensemble.first_tensor.new_zeros(len(ensemble), dtype=torch.float64)
    sums, unreached = float64_zeros(ensemble.params), frozenset(ensemble.params)
    for inputs, targets in data.slices(slice_size(ensemble.params, data)):
        fraction = inputs.shape[1] / data.examples
        batch = batch_gradients(ensemble, loss, inputs, targets, apply_dropout)
        losses.add_(batch.losses, alpha=fraction)
        for name, gradient in batch.gradients.items():
            sums[name].add_(gradient, alpha=fraction)
        unreached &= batch.unreached
    return Derivatives(losses, sums, unreached)


def batch_gradients(
    ensemble: Ensemble,
    loss: Loss,
    inputs: Tensor,
    targets: Tensor,
    apply_dropout: DropoutFunction | None = None,
) -> Derivatives:
    """L and ∇L of every member on one batch (members, examples, …), by default without dropout."""

    def losses(params: Params) -> Tensor:
        return vmap(loss)(ensemble.forward(params, inputs, apply_dropout), targets)

    return differentiate(losses, ensemble.params)


def differentiate(function: Callable[[Params], Tensor], params: Params) -> Derivatives:
    """Values of all members, and the stacked gradients of every member's sum of them.

    A member's values depend only on its parameters, so that one backward pass from the sum over
    all members gives each its gradient.
    """
    points = leaves(params)
    with torch.enable_grad():
        values = function(points)
        tensors = torch.autograd.grad(values.sum(), list(points.values()), allow_unused=True)
    gradients = dict(zip(points, tensors, strict=True))
    unreached = frozenset(n for n, gradient in gradients.items() if gradient is None)
    filled = {n: torch.zeros_like(params[n]) if g is None else g for n, g in gradients.items()}
    return Derivatives(values.detach(), filled, unreached)


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
