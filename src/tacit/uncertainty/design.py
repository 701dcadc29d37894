"""The influence of examples on columns of the design that are means over examples."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.equations.difference import difference_target
from tacit.equations.endpoint import endpoint_target
from tacit.equations.rows import Candidates
from tacit.equations.target import Origin
from tacit.objective.objective import Objective
from tacit.objective.params import Params
from tacit.regularizers import Regularizer
from tacit.uncertainty.directions import EquationRows
from tacit.uncertainty.linear_fit import LinearFit, check_order, identical_data


class DataColumns(NamedTuple):
    """A regularizer whose gradient is computed from data, and its columns or known strength."""

    regularizer: Regularizer
    known_strength: float | None
    """None where the strength is estimated."""
    columns: list[int]
    """Its columns of the design; empty where the strength is known."""


def design_scores(
    origin: Origin,
    rows: EquationRows,
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
    data_columns = list(_data_columns(origin.candidates, rows))
    free = linear_fit.free.nonzero()[:, 0].tolist()
    total = torch.zeros(1, len(free), dtype=torch.float64)
    fixed = [
        entry.regularizer.name
        for entry in data_columns
        if not linear_fit.determined or not _reads_scored_examples(origin, entry.regularizer)
    ]
    varying = [entry for entry in data_columns if entry.regularizer.name not in fixed]
    notes = tuple(f"columns of {name} treated as fixed" for name in fixed)
    if not varying:
        return total, notes
    check_order(origin.setting.objective)
    residual = rows.residual(_mean_target(origin, rows), linear_fit.strengths)
    for regularizer, known_strength, columns in varying:
        assert regularizer.influence is not None
        changes = regularizer.influence(rows.bound.params, [*directions, residual])
        along_directions, along_residual = changes[:, :-1], changes[:, -1]
        if known_strength is None:
            gram_inverse = linear_fit.gram_inverse[free][:, columns]
            from_residual = along_residual @ gram_inverse.T
            change = from_residual - along_directions @ linear_fit.strengths[columns]
        else:
            change = -known_strength * along_directions[:, :, 0]
        total = total + change
    mean = total.mean(0) if weights is None else weights @ total / weights.sum()
    return total - mean, notes


def _data_columns(candidates: Candidates, rows: EquationRows) -> Iterator[DataColumns]:
    """The regularizers that depend on data, estimated ones first."""
    start = 0
    for regularizer, family in zip(candidates.estimated, rows.bound.families, strict=True):
        if regularizer.influence is not None:
            yield DataColumns(regularizer, None, list(range(start, start + family.size)))
        start += family.size
    for regularizer, strength in candidates.known.items():
        if regularizer.influence is not None:
            yield DataColumns(regularizer, strength, [])


def _reads_scored_examples(origin: Origin, regularizer: Regularizer) -> bool:
    """Whether a regularizer is a mean over the examples that are scored."""
    objectives = [o for o in (origin.setting.objective, origin.setting.plain) if o is not None]
    return any(_same_examples(regularizer.objective, objective) for objective in objectives)


def _same_examples(a: Objective | None, b: Objective) -> bool:
    if a is None or a is b:
        return a is b
    if a.loss is None or b.loss is None:  # a batch loss may return weights of its own
        return False
    return identical_data(a, b) and a.weights is b.weights and a.count == b.count


def _mean_target(origin: Origin, rows: EquationRows) -> Params:
    """The target of the equations again, as the mean over groups of draws."""
    objective, plain, params = origin.setting.objective, origin.setting.plain, rows.bound.params
    if plain is None:
        target = endpoint_target(objective, params=params)
    else:
        target = difference_target(objective, plain, params=params, groups=origin.setting.groups)
    vectors = target.points[0].vectors
    return {n: torch.stack([vector[n] for vector in vectors]).mean(0) for n in vectors[0]}
