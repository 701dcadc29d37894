"""The published fit of strengths: Adam on log λ from 1, on the gradients of minibatches.

The weights do not move while λ is fitted, so that a few inner products of each minibatch's gradient
are all that a step needs: they are computed once for a few shuffles, which epochs then draw from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tacit.ensembles import Ensemble
from tacit.ensembles.data import own_data
from tacit.ensembles.evaluation import Loss, batch_slopes
from tacit.ensembles.rows import columns
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
    """Epochs after which the rate is halved if the loss has not fallen by 0.01 %; 0 for never."""


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


class Published(NamedTuple):
    """Where the published fit ends, by member."""

    strengths: np.ndarray
    """(members, strengths)."""
    epochs: np.ndarray
    losses: np.ndarray
    """The lowest mean over an epoch of ‖g_b + Φλ‖²/p."""


def published_fit(given: Statistics, protocol: Protocol) -> Published:
    """Adam on log λ from 1, a step a minibatch, until the loss has not fallen for long.

    Every minibatch of an epoch comes from a shuffle drawn at random, so that epochs differ as
    fresh shuffles do: their noise is what the schedule and the stopping rule react to.
    """
    shuffles, batches, members, count = given.inner.shape
    log, mean, square = (np.zeros((members, count)) for _ in range(3))
    watch = _Watch(members, protocol)
    epochs, step, draws = np.zeros(members, dtype=int), 0, np.random.default_rng(0)
    for _ in range(protocol.epochs):
        total = np.zeros(members)
        for batch, shuffle in enumerate(draws.integers(shuffles, size=batches)):
            step += 1
            inner, strengths = given.inner[shuffle, batch], np.exp(log)
            pulled = np.einsum("mjk,mk->mj", given.gram, strengths)
            total += given.squares[shuffle, batch] + (strengths * (2 * inner + pulled)).sum(1)
            slope = 2 * strengths * (inner + pulled) / given.parameters
            mean = 0.9 * mean + 0.1 * slope
            square = 0.999 * square + 0.001 * slope**2
            scale = np.sqrt(square / (1 - 0.999**step)) + 1e-8
            log -= watch.rate * mean / (1 - 0.9**step) / scale
        epochs[watch.active] += 1
        watch.see(total / batches / given.parameters)
        if not watch.active.any():
            break
    return Published(np.exp(log), epochs, watch.lowest)


class _Watch:
    """Early stopping and torch's ReduceLROnPlateau with its defaults, for every member."""

    def __init__(self, members: int, protocol: Protocol):
        self._protocol = protocol
        self.lowest, self._level = np.full(members, np.inf), np.full(members, np.inf)
        self._waited, self._stalled = np.zeros(members), np.zeros(members)
        self.rate, self.active = np.full((members, 1), protocol.rate), np.ones(members, dtype=bool)

    def see(self, losses: np.ndarray) -> None:
        """Judge an epoch by its loss."""
        self._waited = np.where(losses < self.lowest, 0, self._waited + 1)
        self.lowest = np.where(self.active, np.minimum(losses, self.lowest), self.lowest)
        fell = losses < self._level * (1 - 1e-4)
        self._level = np.where(fell, losses, self._level)
        self._stalled = np.where(fell, 0, self._stalled + 1)
        if self._protocol.plateau:
            late = self._stalled > self._protocol.plateau
            self.rate[late & (self.rate[:, 0] / 2 > 1e-8)] /= 2
            self._stalled[late] = 0
        self.active &= self._waited < self._protocol.patience
        self.rate[~self.active] = 0
