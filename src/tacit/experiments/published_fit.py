"""The published fit of strengths: Adam on log λ from 1, on the gradients of minibatches.

The weights do not move while λ is fitted, so that a few inner products of each minibatch's gradient
are all that a step needs: they are computed once for a few shuffles, which the epochs then repeat.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.ensembles import Ensemble
from tacit.ensembles.columns import columns
from tacit.ensembles.data import own_data
from tacit.ensembles.slopes import Loss, batch_slopes
from tacit.regularizers import Regularizer


@dataclass(frozen=True, eq=False)
class Statistics:
    """What the fit's loss ‖g_b + Φλ‖²/p needs of every minibatch b and member."""

    squares: np.ndarray
    """‖g_b‖², (shuffles, batches, members)."""
    inner: np.ndarray
    """Φᵀg_b, (shuffles, batches, members, strengths)."""
    gram: np.ndarray
    """ΦᵀΦ, (members, strengths, strengths)."""
    parameters: int


@dataclass(frozen=True)
class Protocol:
    """Settings of the published fit."""

    rate: float
    epochs: int
    patience: int
    """Epochs without a lower loss after which a fit stops."""
    plateau: int = 0
    """Epochs without a lower loss after which the rate is halved; 0 for never."""


def statistics(
    ensemble: Ensemble,
    loss: Loss,
    data: Any,
    regularizers: Sequence[Regularizer],
    *,
    batch_size: int,
    shuffles: int,
) -> Statistics:
    """Inner products of minibatch gradients for some shuffles of the data, one order for all."""
    wide = ensemble.to(torch.float64)
    owned = own_data(data, len(wide), wide.first)
    found = [[columns(r, wide.params, name) for name in wide.params] for r in regularizers]
    rows = [torch.cat([c.values[..., 0] for c in each if c is not None], 1) for each in found]
    design = torch.stack(rows, dim=2)
    squares, inner = [], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(shuffles):
        order = torch.randperm(owned.examples, generator=generator).to(design.device)
        batches = owned.batches(order.expand(len(wide), -1), batch_size)
        pairs = [_products(wide, loss, *batch, design) for batch in batches]
        squares.append(torch.stack([square for square, _ in pairs]))
        inner.append(torch.stack([product for _, product in pairs]))
    return Statistics(
        torch.stack(squares).cpu().numpy(),
        torch.stack(inner).cpu().numpy(),
        (design.transpose(1, 2) @ design).cpu().numpy(),
        design.shape[1],
    )


def _products(
    ensemble: Ensemble, loss: Loss, inputs: Tensor, targets: Tensor, design: Tensor
) -> tuple[Tensor, Tensor]:
    slopes = batch_slopes(ensemble, loss, inputs, targets).gradients
    flat = torch.cat([slope.flatten(1) for slope in slopes.values()], 1)
    return flat.square().sum(1), torch.einsum("mp,mpk->mk", flat, design)


def published_fit(given: Statistics, protocol: Protocol) -> tuple[np.ndarray, np.ndarray]:
    """Strengths (members, k) where Adam leaves them, and the epochs that each member took."""
    shuffles, batches, members, count = given.inner.shape
    log, mean, square = (np.zeros((members, count)) for _ in range(3))
    rate = np.full((members, 1), protocol.rate)
    lowest, waited, stalled = np.full(members, np.inf), np.zeros(members), np.zeros(members)
    epochs, active, step = np.zeros(members, dtype=int), np.ones(members, dtype=bool), 0
    for epoch in range(protocol.epochs):
        total = np.zeros(members)
        for squares, inner in zip(
            given.squares[epoch % shuffles], given.inner[epoch % shuffles], strict=True
        ):
            step += 1
            strengths = np.exp(log)
            pulled = np.einsum("mjk,mk->mj", given.gram, strengths)
            total += squares + (strengths * (2 * inner + pulled)).sum(1)
            slope = 2 * strengths * (inner + pulled) / given.parameters
            mean = 0.9 * mean + 0.1 * slope
            square = 0.999 * square + 0.001 * slope**2
            scale = np.sqrt(square / (1 - 0.999**step)) + 1e-8
            log -= np.where(active[:, None], rate * mean / (1 - 0.9**step) / scale, 0)
        epochs[active] += 1
        better = total / batches < lowest
        lowest = np.where(better & active, total / batches, lowest)
        waited = np.where(better, 0, waited + 1)
        stalled = np.where(better, 0, stalled + 1)
        if protocol.plateau:
            rate[stalled > protocol.plateau] /= 2
            stalled[stalled > protocol.plateau] = 0
        active &= waited < protocol.patience
        if not active.any():
            break
    return np.exp(log), epochs
