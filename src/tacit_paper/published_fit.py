"""The published fit of strengths: Adam on log λ, starting at λ = 1, on minibatch gradients.

The fit minimises the mean over minibatches b of

    ‖g_b + Φλ‖²/p = (‖g_b‖² + 2 λᵀΦᵀg_b + λᵀΦᵀΦλ)/p,

where g_b is the gradient of the loss on b, Φ holds the gradients of the regularizers as columns,
and p is the number of parameters. The weights do not move while λ is fitted, so ‖g_b‖², Φᵀg_b and
ΦᵀΦ are all that a step needs. They are computed once for a few shuffles of the data, and epochs
draw their minibatches from these.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tacit.ensembles import Ensemble
from tacit.ensembles.data import assign_data
from tacit.ensembles.evaluation import batch_gradients
from tacit.objective.losses import Loss
from tacit.regularizers import Regularizer


class GradientProducts(NamedTuple):
    """Inner products of the gradients of every minibatch b and member."""

    squares: np.ndarray
    """‖g_b‖², (shuffles, batches, members)."""
    inner: np.ndarray
    """Φᵀg_b, (shuffles, batches, members, strengths)."""
    gram: np.ndarray
    """ΦᵀΦ, (members, strengths, strengths)."""
    parameters: int
    """Number of parameters p of one member."""


class FitSettings(NamedTuple):
    """Settings of the published fit."""

    rate: float
    """Learning rate of Adam."""
    epochs: int
    """Highest number of epochs."""
    patience: int
    """Epochs without a lower loss after which a fit stops."""
    plateau: int = 0
    """Epochs after which the rate is halved if the loss has not fallen by 0.01 %; 0 for never."""


def gradient_products(
    ensemble: Ensemble,
    loss: Loss,
    data: Any,
    regularizers: Sequence[Regularizer],
    *,
    batch_size: int,
    shuffles: int,
) -> GradientProducts:
    """Inner products of minibatch gradients for a few shuffles, the same for all members."""
    ensemble = ensemble.to(torch.float64)
    member_data = assign_data(data, len(ensemble), ensemble.first_tensor)
    columns = []
    for r in regularizers:
        gradients = [r.gradient(ensemble.member(m))[r.name] for m in range(len(ensemble))]
        stacked = {n: torch.stack([gradient[n] for gradient in gradients]) for n in ensemble.params}
        columns.append(ensemble.flatten(stacked))
    design = torch.stack(columns, dim=2)
    squares, inner = [], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(shuffles):
        order = torch.randperm(member_data.examples, generator=generator).to(design.device)
        for batch in member_data.batches(order.expand(len(ensemble), -1), batch_size):
            gradients = batch_gradients(ensemble, loss, *batch).gradients.values()
            flat = torch.cat([gradient.flatten(1) for gradient in gradients], 1)
            squares.append(flat.square().sum(1))
            inner.append(torch.einsum("mp,mpk->mk", flat, design))
    return GradientProducts(
        torch.stack(squares).unflatten(0, (shuffles, -1)).cpu().numpy(),
        torch.stack(inner).unflatten(0, (shuffles, -1)).cpu().numpy(),
        (design.transpose(1, 2) @ design).cpu().numpy(),
        design.shape[1],
    )


class PublishedFits(NamedTuple):
    """Where the published fit of every member ends."""

    strengths: np.ndarray
    """(members, strengths)."""
    epochs: np.ndarray
    """Number of epochs until each fit stopped."""
    losses: np.ndarray
    """The lowest mean over an epoch of ‖g_b + Φλ‖²/p."""


def fit_as_published(products: GradientProducts, settings: FitSettings) -> PublishedFits:
    """Fit log λ by Adam from λ = 1, one step per minibatch, until the loss stops falling.

    Every minibatch of an epoch comes from a shuffle drawn at random, so that epochs differ as
    they would with fresh shuffles: the schedule and the stopping rule react to this noise.

    Trap: these strengths are not the least-squares solution. The fit often stops far from it.
    """
    shuffles, batches, members, count = products.inner.shape
    log_strengths, mean, square = (np.zeros((members, count)) for _ in range(3))
    schedule = _Schedule(members, settings)
    epochs, step, generator = np.zeros(members, dtype=int), 0, np.random.default_rng(0)
    for _ in range(settings.epochs):
        total = np.zeros(members)
        for batch, shuffle in enumerate(generator.integers(shuffles, size=batches)):
            step += 1
            inner, strengths = products.inner[shuffle, batch], np.exp(log_strengths)
            penalty = np.einsum("mjk,mk->mj", products.gram, strengths)  # ΦᵀΦλ
            total += products.squares[shuffle, batch] + (strengths * (2 * inner + penalty)).sum(1)
            gradient = 2 * strengths * (inner + penalty) / products.parameters
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            scale = np.sqrt(square / (1 - 0.999**step)) + 1e-8
            log_strengths -= schedule.rate * mean / (1 - 0.9**step) / scale
        epochs[schedule.active] += 1
        schedule.update(total / batches / products.parameters)
        if not schedule.active.any():
            break
    return PublishedFits(np.exp(log_strengths), epochs, schedule.lowest)


class _Schedule:
    """Early stopping and torch's ReduceLROnPlateau with its defaults, for every member."""

    def __init__(self, members: int, settings: FitSettings):
        self._settings = settings
        self.lowest, self._plateau_loss = np.full(members, np.inf), np.full(members, np.inf)
        self._epochs_without_low, self._epochs_on_plateau = np.zeros(members), np.zeros(members)
        self.rate, self.active = np.full((members, 1), settings.rate), np.ones(members, dtype=bool)

    def update(self, losses: np.ndarray) -> None:
        """Lower the rates and stop the members that this epoch's losses call for."""
        lower = losses < self.lowest
        self._epochs_without_low = np.where(lower, 0, self._epochs_without_low + 1)
        self.lowest = np.where(self.active, np.minimum(losses, self.lowest), self.lowest)
        fell = losses < self._plateau_loss * (1 - 1e-4)
        self._plateau_loss = np.where(fell, losses, self._plateau_loss)
        self._epochs_on_plateau = np.where(fell, 0, self._epochs_on_plateau + 1)
        if self._settings.plateau:
            stalled = self._epochs_on_plateau > self._settings.plateau
            self.rate[stalled & (self.rate[:, 0] / 2 > 1e-8)] /= 2
            self._epochs_on_plateau[stalled] = 0
        self.active &= self._epochs_without_low < self._settings.patience
        self.rate[~self.active] = 0
