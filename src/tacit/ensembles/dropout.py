"""What dropout adds to the loss, for all members at once: difference equations over masks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.ensembles.checks import check_droppable, check_ensemble, check_loss, own_rates
from tacit.ensembles.data import Owned, own_data
from tacit.ensembles.equations import Sources, norms, rounding, write
from tacit.ensembles.evaluation import Loss, whole_slopes
from tacit.ensembles.layout import Layout
from tacit.ensembles.members import Ensemble, check_seeds
from tacit.ensembles.randomness import Chance
from tacit.equations.equations import Equations
from tacit.errors import InputError
from tacit.objective.params import Params
from tacit.objective.passes import track
from tacit.regularizers import Regularizer

FIRST = 8
"""Draws before the noise is looked at."""
MOST = 1024
"""Draws after which a member is given up; its fit then says that it is noisy."""


class Marginal(NamedTuple):
    """Equations of every member, and what they took."""

    equations: list[Equations]
    draws: list[int]
    """Passes over the data with fresh masks."""
    noise: list[float]
    """Part of the target's squared norm that is the masks' noise."""


def dropout_equations(
    ensemble: Ensemble,
    loss: Loss,
    data: Any,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    dropout: float | Sequence[float] | Tensor,
    seeds: Iterable[int],
    noise: float = 0.05,
    given: Mapping[Regularizer, Params] | None = None,
) -> Marginal:
    """Equations Σ λ_k ∇R_k(θ) = E_mask ∇L_mask(θ) − ∇L(θ) of every member: dropout's own effect.

    Masks are drawn over all data, again and again, in two independent groups (two target columns,
    from which an unbiased explained fraction follows), until their noise is below the given part
    of the target's squared norm. Members that are there already cost nothing further.

    Args:
        ensemble: the weights; draws are computed in their dtype and averaged in float64.
        loss: mean loss of a batch, as loss(outputs, targets).
        data: (inputs, targets) that all share, or `Data`.
        regularizers: candidates.
        dropout: the rate of each member, above zero.
        seeds: one a member, for its masks.
        noise: how much of the target's squared norm may be noise.
        given: columns known already, stacked, of regularizers among the candidates.
    """
    check_ensemble(ensemble)
    check_droppable(ensemble)
    owned = own_data(data, len(ensemble), ensemble.first)
    check_loss(ensemble, loss, owned)
    rates = own_rates(dropout, len(ensemble), ensemble.first)
    if not bool((rates > 0).all()):
        raise InputError("dropout is 0 for a member: it then adds nothing. Leave such members out.")
    layout = Layout.of(ensemble.params)
    values, slopes = whole_slopes(ensemble, loss, owned)
    plain = layout.rows(slopes)
    chance = Chance(check_seeds(seeds, len(ensemble)), ensemble.first.device)
    sums, counts = _drawn(ensemble, loss, owned, rates, chance, plain, noise)
    groups = [sums[g] / (counts / 2).unsqueeze(1) - plain for g in range(2)]
    sources = Sources("difference", loss, owned, norms(slopes), values.tolist())
    equations = write(
        ensemble.to(torch.float64), [layout.views(group) for group in groups],
        rounding(ensemble, loss, owned), sources, regularizers, given=given,
    )  # fmt: skip
    return Marginal(equations, counts.int().tolist(), _noise(*groups).tolist())


def _drawn(
    ensemble: Ensemble,
    loss: Loss,
    data: Owned,
    rates: Tensor,
    chance: Chance,
    plain: Tensor,
    noise: float,
) -> tuple[Tensor, Tensor]:
    """Sums of ∇L over masks in two groups, (2, members, parameters), and how many draws."""
    layout = Layout.of(ensemble.params)
    sums = plain.new_zeros(2, *plain.shape)
    counts = plain.new_zeros(len(plain))
    active = torch.arange(len(plain), device=plain.device)
    some, own = ensemble, data
    for number in track(range(MOST), total=MOST, label="masks"):
        slopes = whole_slopes(some, loss, own, chance.drop(rates[active])).gradients
        sums[number % 2].index_add_(0, active, layout.rows(slopes))
        counts[active] += 1
        done = number + 1
        if done % 2 or done < FIRST:
            continue
        halves = [sums[g, active] / (done / 2) - plain[active] for g in range(2)]
        left = torch.nonzero(~(_noise(*halves) <= noise))[:, 0]
        if not len(left):
            break
        if len(left) < len(active):
            active = active[left]
            chance.keep(left)
            some, own = ensemble.chosen(active.tolist()), data.of(active)
    return sums, counts


def _noise(first: Tensor, second: Tensor) -> Tensor:
    """Part of ‖mean‖² that is noise, from how far two independent halves are apart."""
    apart = (first - second).square().sum(1) / 4
    return apart / ((first + second) / 2).square().sum(1)
