"""Standard errors for the random choice of examples, from one pass over them."""

import math
from collections.abc import Hashable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tacit.equations.target import Setting
from tacit.errors import InputError
from tacit.fitting.fits import Fit
from tacit.objective.objective import Objective
from tacit.objective.params import Params
from tacit.objective.per_example import DirectionalDerivatives
from tacit.objective.randomness import split_draws
from tacit.uncertainty.design import design_scores
from tacit.uncertainty.directions import EquationRows, balanced_signs
from tacit.uncertainty.linear_fit import (
    check_orders,
    check_strengths,
    linear_fit_of,
    mean_and_deviations,
    scored_origin,
)
from tacit.uncertainty.sampling import Scores, covariance_of_mean

SEED = 0
"""Seed of the random signs with which the noise of the whole target is estimated."""
MAX_PROBES, PROBE_ENTRIES = 8, 2**16
"""Largest number of directions of random signs, and of entries in all of them together."""


def score_examples(
    fit: Fit,
    *,
    population: float | None = None,
    clusters: Sequence[Hashable] | Tensor | None = None,
) -> Scores:
    """The influence of every example on every strength: standard errors, bootstrap, outliers.

    λ̂ = (ΦᵀΦ)⁻¹Φᵀb is linear in b = −∇L, the mean of −∇ℓ_i over examples. The influence of example
    i is therefore its deviation from the mean of −⟨∇ℓ_i, v_j⟩, with v_j the columns of Φ(ΦᵀΦ)⁻¹.
    One pass computes these derivatives for all examples and strengths, at the cost of about four
    forward passes and two or three more per strength.

    The columns of `gradient_norm` and `explicit_dropout` are means over examples too; where they
    read the same data, their influence is included, at a few more passes.

    Traps: the columns of a `regularizer` of your own are treated as fixed, because it is not known
    which data it reads. If the model was trained on exactly these examples, nothing was sampled:
    pass population=len(data).

    Args:
        fit: a fit of endpoint or difference equations at one point. For a difference, the technique
            and plain objectives must have the same examples in the same order.
        population: number of examples these were drawn from, at random without replacement; by
            default infinite.
        clusters: one label per example, where examples with the same label (one patient, one
            document) are not independent of each other.
    """
    origin = scored_origin(fit, "score_examples")
    rows = EquationRows(origin.bind())
    linear_fit = linear_fit_of(fit)
    if origin.setting.plain is not None or clusters is not None:
        check_orders(origin, labelled=clusters is not None)
    # tr Cov of the target: in a large model from a signed sum of gradients, which the pass computes
    # anyway but which needs independent examples; otherwise along directions of random signs.
    large = clusters is None and fit.rows > PROBE_ENTRIES
    probes = 0 if large else max(1, min(MAX_PROBES, PROBE_ENTRIES // fit.rows))
    directions = rows.directions(
        linear_fit.gram_inverse[:, linear_fit.free], [SEED + MAX_PROBES * i for i in range(probes)]
    )
    signs = balanced_signs(origin.setting.objective.count, seed=SEED) if large else None
    derivatives = _target_derivatives(origin.setting, rows.bound.params, directions, signs)
    mean, deviations = mean_and_deviations(derivatives)
    population_size = _population_size(population, derivatives)
    labels = _cluster_indices(clusters, len(deviations))
    count = int(linear_fit.free.sum())
    influence = deviations[:, :count]
    check_strengths(linear_fit, rows, directions, mean[:count], influence)
    values = torch.zeros(len(influence), len(linear_fit.free), dtype=torch.float64)
    values[:, linear_fit.free] = influence
    covariance = covariance_of_mean(values, derivatives.weights, labels)
    factor = linear_fit.design_factor
    largest = torch.linalg.eigvalsh(factor @ covariance @ factor.T)[-1]
    variance = _target_variance(derivatives, deviations[:, count:], rows, labels)
    notes, design_varies = (), False
    candidates = origin.candidates
    if any(r.influence is not None for r in (*candidates.estimated, *candidates.known)):
        shifts, notes = design_scores(
            origin, rows, linear_fit, directions[:count], derivatives.weights
        )
        values[:, linear_fit.free] += shifts
        design_varies = bool(shifts.any())
    return Scores(
        names=tuple(fit.strengths),
        strengths=dict(fit.strengths),
        values=values,
        weights=derivatives.weights,
        population=population_size,
        clusters=labels,
        covariance_trace=variance * len(values),
        correlation=max(1.0, float(largest) / (variance / fit.rows)) if variance else 1.0,
        target_square_norm=linear_fit.target_square_norm,
        rows=fit.rows,
        free=linear_fit.free,
        inflation=linear_fit.inflation,
        notes=notes,
        design_varies=design_varies,
    )


def with_sampling_errors(fit: Fit, population: float | None) -> Fit:
    """An endpoint fit with error bars of sampling.

    The fit is returned unchanged where no population is given, and where λ ≥ 0 holds every
    strength at zero.
    """
    if population is None or (fit.nonnegative and not any(fit.strengths.values())):
        return fit
    scores = score_examples(fit, population=population)
    return fit.with_error_bars(scores.error_bars(), *scores.problems)


def _target_derivatives(
    setting: Setting, params: Params, directions: Sequence[Params], signs: Tensor | None
) -> DirectionalDerivatives:
    """⟨b_i, v_j⟩ of every example and direction, before known penalties are subtracted from b."""
    groups, options = setting.groups, (params, directions, signs)
    technique = _mean_over_groups(setting.objective, groups, *options)
    if setting.plain is None:
        return DirectionalDerivatives(-technique.values, technique.weights, technique.signed_sum)
    plain = _mean_over_groups(setting.plain, groups, *options)
    if technique.values.shape != plain.values.shape:
        raise InputError(
            f"the technique has {len(technique.values)} examples and plain has "
            f"{len(plain.values)}: their difference by example needs the same examples in the same "
            "order."
        )
    a, b = technique.weights, plain.weights
    if (a is None) is not (b is None) or (a is not None and b is not None and not a.equal(b)):
        raise InputError(
            "the technique and plain have different weights of examples: pass the same weights."
        )
    signed_sum = None
    if technique.signed_sum is not None and plain.signed_sum is not None:
        subtracted = plain.signed_sum
        signed_sum = {n: total - subtracted[n] for n, total in technique.signed_sum.items()}
    return DirectionalDerivatives(technique.values - plain.values, technique.weights, signed_sum)


def _mean_over_groups(
    objective: Objective,
    count: int,
    params: Params,
    directions: Sequence[Params],
    signs: Tensor | None,
) -> DirectionalDerivatives:
    """Derivatives averaged over groups of draws, each group with equal weight, as in the target."""
    draws = [range(objective.draws)]
    if objective.training:
        draws = split_draws(objective.draws, count, paired=objective.paired)
    if len({len(group) for group in draws}) == 1:  # the mean over groups is that over all draws
        return objective.directional_derivatives(directions, params, signs=signs)
    groups = [
        objective.directional_derivatives(directions, params, draws=group, signs=signs)
        for group in draws
    ]
    sums = [group.signed_sum for group in groups if group.signed_sum is not None]
    mean = {n: torch.stack([part[n] for part in sums]).mean(0) for n in sums[0]} if sums else None
    return DirectionalDerivatives(
        torch.stack([group.values for group in groups]).mean(0), groups[0].weights, mean
    )


def _target_variance(
    derivatives: DirectionalDerivatives, probed: Tensor, rows: EquationRows, labels: Tensor | None
) -> float:
    """Estimate tr Cov of the target, from a signed sum of gradients or deviations along probes."""
    if derivatives.signed_sum is None:
        return float(covariance_of_mean(probed, derivatives.weights, labels).diagonal().mean())
    weights = derivatives.weights
    total_weight = len(derivatives.values) if weights is None else float(weights.sum())
    return rows.square_norm(derivatives.signed_sum) / total_weight**2


def _population_size(population: Any, derivatives: DirectionalDerivatives) -> int | None:
    """The population as an int; None if infinite. NumPy integers and floats (4e4) are accepted."""
    if population is None or population == math.inf:
        return None
    weights = derivatives.weights
    count = len(derivatives.values) if weights is None else int((weights > 0).sum())
    is_number = isinstance(population, Real) and not isinstance(population, bool)
    if not is_number or not float(population).is_integer() or population < count:
        raise InputError(
            f"population is {population!r} for {count} examples: pass the number of examples that "
            "these were drawn from, a whole number, or math.inf for an infinite population."
        )
    return int(float(population))


def _cluster_indices(clusters: Sequence[Hashable] | Tensor | None, count: int) -> Tensor | None:
    """Clusters as indices from 0, in the order of their first examples."""
    if clusters is None:
        return None
    if isinstance(clusters, Tensor) and clusters.ndim != 1:
        raise InputError(
            f"clusters has shape {tuple(clusters.shape)}: pass one label per example, as a list or "
            "a tensor of one dimension."
        )
    labels = clusters.tolist() if isinstance(clusters, Tensor) else list(clusters)
    if len(labels) != count:
        raise InputError(
            f"clusters has {len(labels)} labels for {count} examples: pass one label per example."
        )
    indices = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    if len(indices) < 2:
        raise InputError(
            "all examples are in one cluster, and an error cannot be estimated from it: pass "
            "labels of two or more clusters, or leave clusters= out."
        )
    return torch.tensor([indices[label] for label in labels])
