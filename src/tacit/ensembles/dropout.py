"""The effect of dropout on the gradient of every member: difference equations over masks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.ensembles.checks import dropout_rates, prepare
from tacit.ensembles.data import MemberData
from tacit.ensembles.equations import rounding_floors
from tacit.ensembles.evaluation import mean_gradients
from tacit.ensembles.members import Ensemble, check_seeds
from tacit.ensembles.randomness import MemberRandomness
from tacit.ensembles.targets import MemberTargets
from tacit.equations.equations import Equations
from tacit.errors import InputError
from tacit.objective.losses import Loss
from tacit.objective.params import Params
from tacit.objective.passes import track
from tacit.regularizers import Regularizer

MIN_DRAWS = 8
"""Number of draws before the noise is first estimated."""
MAX_DRAWS = 1024
"""Number of draws after which a member stops; its fit then reports a noisy target."""


class DropoutEquations(NamedTuple):
    """The equations of every member, with the number of draws and the noise that remains."""

    equations: list[Equations]
    draws: list[int]
    """Number of passes over the data with fresh masks, for each member."""
    noise: list[float]
    """Fraction of the target's squared norm that is noise of the masks, for each member."""


def dropout_equations(
    ensemble: Ensemble,
    loss: Loss,
    data: Any,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    dropout: float | Sequence[float] | Tensor,
    seeds: Iterable[int],
    noise: float = 0.05,
    columns: Mapping[Regularizer, Params] | None = None,
) -> DropoutEquations:
    """Equations Σ λ_k ∇R_k(θ) = E_mask ∇L_mask(θ) − ∇L(θ) of every member: the effect of dropout.

    Each draw is a pass over all data with fresh masks. Draws alternate between two independent
    groups, which become two target columns, so that the explained fraction is unbiased. A member
    is finished when its noise is at most `noise`, and then costs nothing further.

    Args:
        ensemble: the weights; gradients are computed in their dtype and averaged in float64.
        loss: mean loss of a batch, loss(outputs, targets).
        data: (inputs, targets) that all members share, or `Data`.
        regularizers: candidates.
        dropout: the rate of each member, above zero.
        seeds: one per member, for its masks.
        noise: the fraction of the target's squared norm that may be noise.
        columns: stacked columns that were computed already, of regularizers with one strength
            among the candidates.
    """
    ensemble, data = prepare(ensemble, loss, data)
    rates = dropout_rates(dropout, ensemble)
    if not bool((rates > 0).all()):
        raise InputError(
            "dropout is 0 for a member, where it has no effect: leave out such members, for "
            "instance with ensemble.select(members)."
        )
    losses, gradients, unreached = mean_gradients(ensemble, loss, data)
    plain = ensemble.flatten(gradients)
    randomness = MemberRandomness(check_seeds(seeds, len(ensemble)), plain.device)
    sums, draws = _sum_masked_gradients(ensemble, loss, data, rates, randomness, plain, noise)
    groups = [sums[g] / (draws / 2).unsqueeze(1) - plain for g in range(2)]
    equations = MemberTargets(
        "difference",
        ensemble.to(torch.float64),
        [ensemble.views(group) for group in groups],
        rounding_floors(ensemble, loss, data),
        loss,
        data.examples,
        gradients,
        losses.tolist(),
        columns=columns or {},
        unreached=unreached,
    ).equations(regularizers)
    return DropoutEquations(equations, draws.int().tolist(), _noise_fraction(*groups).tolist())


def _sum_masked_gradients(
    ensemble: Ensemble,
    loss: Loss,
    data: MemberData,
    rates: Tensor,
    randomness: MemberRandomness,
    plain: Tensor,
    noise: float,
) -> tuple[Tensor, Tensor]:
    """Sums of ∇L over masks in two groups, (2, members, parameters), and the draws per member."""
    sums, draws = plain.new_zeros(2, *plain.shape), plain.new_zeros(len(plain))
    active = torch.arange(len(plain), device=plain.device)
    active_ensemble, active_data = ensemble, data
    for number in track(range(MAX_DRAWS), total=MAX_DRAWS, label="masks"):
        apply_dropout = randomness.dropout(rates[active])
        gradients = mean_gradients(active_ensemble, loss, active_data, apply_dropout).gradients
        sums[number % 2].index_add_(0, active, ensemble.flatten(gradients))
        draws[active] += 1
        if number % 2 == 0 or number + 1 < MIN_DRAWS:
            continue
        groups = [sums[g, active] / ((number + 1) / 2) - plain[active] for g in range(2)]
        noisy = torch.nonzero(~(_noise_fraction(*groups) <= noise))[:, 0]
        if not len(noisy):
            break
        if len(noisy) < len(active):
            active = active[noisy]
            randomness.restrict_to(noisy)
            active_ensemble, active_data = ensemble.select(active.tolist()), data.select(active)
    return sums, draws


def _noise_fraction(first: Tensor, second: Tensor) -> Tensor:
    """Fraction of the squared norm of the mean of two independent groups that is noise.

    With independent noise ε₁, ε₂ of equal variance in the groups, E‖first − second‖² = 2 E‖ε‖²
    and the noise of the mean is E‖(ε₁ + ε₂)/2‖² = E‖ε‖²/2, hence ‖first − second‖²/4.
    """
    noise = (first - second).square().sum(1) / 4
    return noise / ((first + second) / 2).square().sum(1)
