"""Losses and gradients of all members, whole or batch by batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.checks import check_ensemble, check_loss
from tacit.ensembles.data import Owned, own_data
from tacit.ensembles.forward import Drop
from tacit.ensembles.members import Ensemble
from tacit.objective.params import Params

Loss = Callable[[Any, Any], Tensor]
"""Mean loss of one member's batch: loss(outputs, targets), as torch.nn.functional.mse_loss."""

ENTRIES = 2**22
"""Entries of one layer's activations, of all members, that are held at once."""


class Slopes(NamedTuple):
    """Mean losses (members) and their gradients, stacked."""

    values: Tensor
    gradients: Params


def gradients(ensemble: Ensemble, loss: Loss, data: Any) -> Slopes:
    """L and ∇L of every member over all its examples, in float64 and without dropout."""
    check_ensemble(ensemble)
    wide = ensemble.to(torch.float64)
    owned = own_data(data, len(wide), wide.first)
    check_loss(wide, loss, owned)
    return whole_slopes(wide, loss, owned)


def whole_slopes(ensemble: Ensemble, loss: Loss, data: Owned, drop: Drop | None = None) -> Slopes:
    """L and ∇L over all examples, in the ensemble's dtype and summed in float64."""
    values = ensemble.first.new_zeros(len(ensemble), dtype=torch.float64)
    sums = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in ensemble.params.items()}
    for inputs, targets in data.slices(slice_size(ensemble.params, data)):
        part = inputs.shape[1] / data.examples
        value, slopes = batch_slopes(ensemble, loss, inputs, targets, drop)
        values.add_(value, alpha=part)
        for name, slope in slopes.items():
            sums[name].add_(slope, alpha=part)
    return Slopes(values, sums)


def batch_slopes(
    ensemble: Ensemble, loss: Loss, inputs: Tensor, targets: Tensor, drop: Drop | None = None
) -> Slopes:
    """L and ∇L of every member on one batch (members, examples, …), by default without dropout."""
    leaves = {n: p.detach().requires_grad_() for n, p in ensemble.params.items()}
    with torch.enable_grad():
        values = vmap(loss)(ensemble.forward(leaves, inputs, drop), targets)
        slopes = torch.autograd.grad(values.sum(), list(leaves.values()), materialize_grads=True)
    return Slopes(values.detach(), dict(zip(leaves, slopes, strict=True)))


def mean_loss(ensemble: Ensemble, loss: Loss, data: Owned) -> Tensor:
    """The loss of every member over all its examples, without dropout."""
    losses, total = vmap(loss), ensemble.first.new_zeros(len(ensemble))
    with torch.no_grad():
        for inputs, targets in data.slices(slice_size(ensemble.params, data)):
            outputs = ensemble.forward(ensemble.params, inputs, None)
            total.add_(losses(outputs, targets), alpha=inputs.shape[1] / data.examples)
    return total


def slice_size(params: Params, data: Owned) -> int:
    """Examples at once, so that activations stay within memory, and on a CPU near its caches."""
    widest = max(data.inputs[0, 0].numel(), *(max((1, *p.shape[1:2])) for p in params.values()))
    entries = ENTRIES if data.inputs.device.type == "cpu" else 2**6 * ENTRIES
    return max(1, entries // (widest * len(data.owner)))
