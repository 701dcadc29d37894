"""The influence of examples on columns of the design that are themselves means over examples."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.objective.objective import Objective
from tacit.objective.params import Params
from tacit.objective.randomness import split_draws
from tacit.regularizers import Regularizer
from tacit.uncertainty.linear_fit import LinearFit, Setting, check_order, identical_data


class DataColumns(NamedTuple):
    """A regularizer whose gradient is read from data, and its place in the equations."""

    regularizer: Regularizer
    known_strength: float | None
    """None where the strength is estimated."""
    columns: list[int]
    """Its columns of the design; empty where the strength is known."""


def design_scores(
    setting: Setting,
    linear_fit: LinearFit,
    directions: Sequence[Params],
    weights: Tensor | None,
) -> tuple[Tensor, tuple[str, ...]]:
    """What varying columns add to the influence of every example on the free strengths, centred.

    With M = (ΦᵀΦ)⁻¹ and the residual r = b − Φλ̂, the derivative of the normal equations gives
    dλ̂ = M[dΦᵀr + Φᵀ(db − dΦ λ̂)]. The terms in dΦ are, for column φ_m and the directions v_j (the
    columns of ΦM),

        M_jm ⟨dφ_m, r⟩ − λ_m ⟨dφ_m, v_j⟩;

    a known penalty of strength s adds −s ⟨dφ, v_j⟩.

    Also returns notes that name the columns treated as fixed: those that read other data, and all
    of them where the strengths are not determined.
    """
    data_columns = list(_data_columns(setting))
    free = linear_fit.free.nonzero()[:, 0].tolist()
    total = torch.zeros(1, len(free), dtype=torch.float64)
    fixed = [
        entry.regularizer.name
        for entry in data_columns
        if not linear_fit.determined or not _reads_scored_examples(setting, entry.regularizer)
    ]
    varying = [entry for entry in data_columns if entry.regularizer.name not in fixed]
    notes = tuple(f"columns of {name} treated as fixed" for name in fixed)
    if not varying:
        return total, notes
    check_order(setting.objective)
    residual = setting.rows.residual(_target(setting), linear_fit.strengths)
    for regularizer, known_strength, columns in varying:
        assert regularizer.influence is not None
        changes = regularizer.influence(setting.params, [*directions, residual])
        along_directions, along_residual = changes[:, :-1], changes[:, -1]
        if known_strength is None:
            gram_inverse = linear_fit.gram_inverse[free][:, columns]
            from_residual = along_residual @ gram_inverse.T
            part = from_residual - along_directions @ linear_fit.strengths[columns]
        else:
            part = -known_strength * along_directions[:, :, 0]
        total = total + part
    mean = total.mean(0) if weights is None else weights @ total / weights.sum()
    return total - mean, notes


def _data_columns(setting: Setting) -> Iterator[DataColumns]:
    """The regularizers that are read from data, estimated ones first."""
    start = 0
    families = setting.rows.bound.families
    for regularizer, family in zip(setting.candidates.estimated, families, strict=True):
        if regularizer.influence is not None:
            yield DataColumns(regularizer, None, list(range(start, start + family.size)))
        start += family.size
    for regularizer, strength in setting.candidates.known.items():
        if regularizer.influence is not None:
            yield DataColumns(regularizer, strength, [])


def _reads_scored_examples(setting: Setting, regularizer: Regularizer) -> bool:
    """Whether a regularizer is a mean over the examples that are scored."""
    objectives = [o for o in (setting.objective, setting.plain) if o is not None]
    return any(_same_examples(regularizer.objective, objective) for objective in objectives)


def _same_examples(a: Objective | None, b: Objective) -> bool:
    if a is None or a is b:
        return a is b
    if a.loss is None or b.loss is None:  # a batch loss may return weights of its own
        return False
    return identical_data(a, b) and a.weights is b.weights and a.count == b.count


def _target(setting: Setting) -> Params:
    """The target of the equations, before known penalties are subtracted."""
    gradient = _mean_gradient(setting.objective, setting)
    if setting.plain is None:
        return {n: -g for n, g in gradient.items()}
    plain = _mean_gradient(setting.plain, setting)
    return {n: g - plain[n] for n, g in gradient.items()}


def _mean_gradient(objective: Objective, setting: Setting) -> Params:
    """The gradient averaged over groups of draws, each group with equal weight."""
    params = setting.params
    if not objective.training:
        return objective.gradient(params)
    groups = split_draws(objective.draws, setting.draw_groups, paired=objective.paired)
    gradients = [objective.value_and_gradient(params, draws=group)[1] for group in groups]
    return {n: torch.stack([g[n] for g in gradients]).mean(0) for n in gradients[0]}
