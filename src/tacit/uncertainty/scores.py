"""Standard errors for the random choice of examples, from one pass over them."""

import math
from collections.abc import Hashable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tacit.equations.points import Setting
from tacit.equations.target import origin_of
from tacit.errors import InputError
from tacit.fitting.fits import Fit
from tacit.objective.objective import Objective
from tacit.objective.params import Params, shorten
from tacit.objective.per_example import DirectionalDerivatives
from tacit.objective.randomness import split_draws
from tacit.objective.ranks import current_ranks
from tacit.uncertainty.design import design_scores
from tacit.uncertainty.directions import balanced_signs, build_directions, square_norm_of_rows
from tacit.uncertainty.linear_fit import (
    check_order,
    check_strengths,
    linear_fit_of,
    mean_and_deviations,
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
    One pass computes these derivatives for all examples and strengths. For three strengths it costs
    about six forward passes where examples do not interact and each has one loss, and about twelve
    for losses of tokens and for models with activation checkpointing or custom functions that read
    parameters.

    The columns of `mean_of`, `gradient_norm`, `explicit_dropout` and others depend on the examples
    too; where they read the same data, their influence is included, at a few more passes. Columns
    that are treated as fixed are named in the notes.

    Traps: the columns of a `regularizer` of your own are treated as fixed, because it is not known
    which data it reads. If the model was trained on exactly these examples, nothing was sampled:
    pass population=len(data).

    Args:
        fit: a fit of endpoint or difference equations at one point. For a difference, the technique
            and plain objectives must have the same examples in the same order.
        population: number of examples these were drawn from, at random without replacement; by
            default infinite. Where a batch is the unit, infinite or the number of batches.
        clusters: one label per example, where examples with the same label (one patient, one
            document) are not independent of each other. Where several processes share the model,
            each passes the labels of its own examples.
    """
    with origin_of(fit, "score_examples").setting.ranks:
        return _score_examples(fit, population, clusters)


def _score_examples(
    fit: Fit, population: float | None, clusters: Sequence[Hashable] | Tensor | None
) -> Scores:
    linear_fit = linear_fit_of(fit, "score_examples")
    setting, bound, free = linear_fit.origin.setting, linear_fit.bound, linear_fit.free
    if setting.plain is not None or clusters is not None:
        check_order(setting, labelled=clusters is not None)
    # tr Cov of the target: in a large model from a signed sum of gradients, which costs little but
    # needs independent examples; otherwise along directions of random signs.
    large = clusters is None and fit.rows > PROBE_ENTRIES
    probes = 0 if large else max(1, min(MAX_PROBES, PROBE_ENTRIES // fit.rows))
    seeds = [SEED + MAX_PROBES * i for i in range(probes)]
    directions = build_directions(bound, linear_fit.gram_inverse[:, free], seeds)
    signs = balanced_signs(setting.objective.count, seed=SEED) if large else None
    derivatives = _target_derivatives(setting, bound.params, directions, signs)
    weights, count = derivatives.weights, int(free.sum())
    mean, deviations = mean_and_deviations(derivatives.values, weights)
    check_strengths(linear_fit, directions, mean[:count], deviations[:, :count])
    labels = _cluster_indices(clusters, len(deviations))
    unit = setting.objective.unit
    population_size = _population_size(population, derivatives, unit)
    values = torch.zeros(len(deviations), len(free), dtype=torch.float64)
    values[:, free] = deviations[:, :count]
    covariance, probe_covariance = (
        covariance_of_mean(part, weights, labels) for part in (values, deviations[:, count:])
    )
    factor = linear_fit.design_factor
    largest = torch.linalg.eigvalsh(factor @ covariance @ factor.T)[-1]
    variance = float(probe_covariance.diagonal().mean())
    along_columns = float((factor @ covariance @ factor.T).diagonal().sum())
    if derivatives.signed_sum is not None and signs is not None:
        total_weight = len(values) if weights is None else float(weights.sum())
        squares = torch.ones(len(values)) if weights is None else weights.square()
        all_over_signed = float(squares.sum() / squares[signs != 0].sum())
        square_norm = square_norm_of_rows(bound, derivatives.signed_sum)
        variance = all_over_signed * square_norm / total_weight**2
    shifts, notes = torch.zeros(1, count), ()
    candidates = linear_fit.origin.candidates
    regularizers = (*candidates.estimated, *candidates.known)
    custom = [r.name for r in regularizers if r.custom]
    if any(r.objective is not None for r in regularizers):
        shifts, notes = design_scores(linear_fit, directions[:count], weights)
        values[:, free] += shifts
    if custom:
        own = f"columns of {shorten(custom)} treated as fixed, as if they did not read the examples"
        notes = (*notes, own)
    return Scores(
        names=tuple(fit.strengths),
        strengths=dict(fit.strengths),
        values=values,
        weights=weights,
        population=population_size,
        clusters=labels,
        covariance_trace=variance * len(values),
        correlation=max(1.0, float(largest) / (variance / fit.rows)) if variance else 1.0,
        target_square_norm=linear_fit.target_square_norm,
        residual_square_norm=(1 - fit.explained) * linear_fit.target_square_norm,
        residual_trace=max(0.0, variance - along_columns) * len(values),
        probe_covariance=probe_covariance,
        rows=fit.rows,
        free=free,
        inflation=linear_fit.inflation,
        notes=notes,
        design_varies=bool(shifts.any()),
        custom=bool(custom),
        unit=unit,
    )


def with_sampling_errors(fit: Fit, population: float | None) -> Fit:
    """An endpoint fit with error bars of sampling.

    The fit is returned unchanged where no population is given, where λ ≥ 0 holds every strength at
    zero, and where Λ ⪰ 0 binds.
    """
    all_bounded = bool(fit.equations.bounded(nonnegative=fit.nonnegative).all())
    held = fit.psd_binds or (all_bounded and not any(fit.strengths.values()))
    if population is None or held:
        return fit
    scores = score_examples(fit, population=population)
    return fit.with_error_bars(scores.error_bars(), *scores.problems)


def _target_derivatives(
    setting: Setting, params: Params, directions: Sequence[Params], signs: Tensor | None
) -> DirectionalDerivatives:
    """⟨b_i, v_j⟩ of every example and direction, before known penalties are subtracted from b."""
    options = (setting.groups, params, directions, signs)
    technique = _mean_over_groups(setting.objective, *options)
    if setting.plain is None:
        return technique._replace(values=-technique.values)
    plain = _mean_over_groups(setting.plain, *options)
    if len(technique.values) != len(plain.values):
        raise InputError(
            f"the technique has {len(technique.values)} examples and plain has "
            f"{len(plain.values)}: pass the same examples in the same order."
        )
    a, b = technique.weights, plain.weights
    if not (a is b if a is None or b is None else a.equal(b)):
        raise InputError(
            "the technique and plain have different weights of examples: pass the same weights."
        )
    ours, theirs = technique.signed_sum or {}, plain.signed_sum or {}
    signed_sum = {name: total - theirs[name] for name, total in ours.items()}
    return DirectionalDerivatives(technique.values - plain.values, a, signed_sum or None)


def _mean_over_groups(
    objective: Objective,
    groups: int,
    params: Params,
    directions: Sequence[Params],
    signs: Tensor | None,
) -> DirectionalDerivatives:
    """Derivatives averaged over groups of draws, each group with equal weight, as in the target."""
    draws = []
    if objective.random:
        draws = split_draws(objective.draws, groups, paired=objective.paired)
    if len({len(group) for group in draws}) < 2:  # the mean over equal groups is that over all
        return objective.directional_derivatives(directions, params, signs=signs)
    parts = [
        objective.directional_derivatives(directions, params, draws=group, signs=signs)
        for group in draws
    ]
    sums = [part.signed_sum for part in parts if part.signed_sum is not None]
    mean = {n: torch.stack([part[n] for part in sums]).mean(0) for n in sums[0]} if sums else None
    values = torch.stack([part.values for part in parts]).mean(0)
    return DirectionalDerivatives(values, parts[0].weights, mean)


def _population_size(population: Any, derivatives: DirectionalDerivatives, unit: str) -> int | None:
    """The population as an int; None if infinite. NumPy integers and floats (4e4) are accepted."""
    if population is None or population == math.inf:
        return None
    weights = derivatives.weights
    count = len(derivatives.values) if weights is None else int((weights > 0).sum())
    if unit == "batches" and population != count:
        raise InputError(
            f"population is {population!r}, but the unit here is a batch, and there are {count}: "
            f"pass {count} if the model was trained on exactly these, or math.inf."
        )
    is_number = isinstance(population, Real) and not isinstance(population, bool)
    if not is_number or not float(population).is_integer() or population < count:
        raise InputError(
            f"population is {population!r} for {count} examples: pass the number of examples they "
            "were drawn from, a whole number, or math.inf for an infinite population."
        )
    return int(float(population))


def _cluster_indices(clusters: Sequence[Hashable] | Tensor | None, count: int) -> Tensor | None:
    """Clusters as indices from 0, in the order of their first examples."""
    if clusters is None:
        return None
    own_labels = clusters.tolist() if isinstance(clusters, Tensor) else list(clusters)
    labels = [label for part in current_ranks().gather(own_labels) for label in part]
    shape = tuple(clusters.shape) if isinstance(clusters, Tensor) else (len(own_labels),)
    if len(shape) != 1 or len(labels) != count:
        raise InputError(
            f"clusters has shape {shape} for {count} examples: pass one label per example, as a "
            "list or a tensor of one dimension; each process of several those of its own examples."
        )
    indices = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    if len(indices) < 2:
        raise InputError(
            "all examples are in one cluster: pass two or more, or leave clusters= out."
        )
    return torch.tensor([indices[label] for label in labels])
