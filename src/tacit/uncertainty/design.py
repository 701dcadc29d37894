"""The influence of examples on columns of the design that are means over examples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.equations.difference import difference_target
from tacit.equations.target import Setting, endpoint_target
from tacit.objective.objective import Objective
from tacit.objective.params import Params
from tacit.uncertainty.directions import unexplained_rows
from tacit.uncertainty.linear_fit import (
    LinearFit,
    check_order,
    identical_data,
    mean_and_deviations,
)


def design_scores(
    linear_fit: LinearFit, directions: Sequence[Params], weights: Tensor | None
) -> tuple[Tensor, tuple[str, ...]]:
    """What varying columns add to the influence of every example on the free strengths, centred.

    With M = (ΦᵀΦ)⁻¹ and the residual r = b − Φλ̂, the derivative of the normal equations gives
    dλ̂ = M[dΦᵀr + Φᵀ(db − dΦ λ̂)]. The terms in dΦ are, for column φ_m and the directions v_j (the
    columns of ΦM),

        M_jm ⟨dφ_m, r⟩ − λ_m ⟨dφ_m, v_j⟩;

    a known penalty of strength s adds −s ⟨dφ, v_j⟩, as if its M were zero.

    Also returns notes that name the columns treated as fixed: those that read other data or do not
    tell how examples change them, and all of them where the strengths are not determined.
    """
    setting, candidates = linear_fit.origin.setting, linear_fit.origin.candidates
    known = torch.tensor(list(candidates.known.values()), dtype=torch.float64)
    sizes = [family.size for family in linear_fit.bound.families] + [1] * len(known)
    all_strengths = torch.cat([linear_fit.strengths, known])
    M = linear_fit.gram_inverse[linear_fit.free]
    M = torch.cat([M, M.new_zeros(len(M), len(known))], dim=1)
    regularizers = (*candidates.estimated, *candidates.known)
    terms = zip(regularizers, all_strengths.split(sizes), M.split(sizes, dim=1), strict=True)
    varying, notes = [], []
    for regularizer, strengths, columns in terms:
        if regularizer.objective is None:
            continue
        influence, fixed = regularizer.influence, not linear_fit.determined
        if influence and not fixed and _reads_scored_examples(regularizer.objective, setting):
            varying.append((influence, strengths, columns))
        else:
            notes.append(f"columns of {regularizer.name} treated as fixed")
    total = torch.zeros(1, len(M), dtype=torch.float64)
    if not varying:
        return total, tuple(notes)
    check_order(setting)
    point = linear_fit.bound.params
    unexplained = unexplained_rows(
        linear_fit.bound, _mean_target(setting, point), linear_fit.strengths
    )
    for influence, strengths, columns in varying:
        changes = influence(point, [*directions, unexplained])
        total = total + (changes[:, -1] @ columns.T - changes[:, :-1] @ strengths)
    _, centred = mean_and_deviations(total, weights)
    return centred, tuple(notes)


def _reads_scored_examples(source: Objective, setting: Setting) -> bool:
    """Whether a regularizer's objective is over the examples that are scored."""
    scored = [o for o in (setting.objective, setting.plain) if o is not None]
    return any(_same_examples(source, objective) for objective in scored)


def _same_examples(a: Objective, b: Objective) -> bool:
    """Whether two objectives have the same examples, in the same order, with the same weights."""
    if a is b:
        return True
    same_data = identical_data(a, b) and a.weights is b.weights and a.unit == b.unit
    if not same_data or (a.unit == "batches" and not _same_batches(a, b)) or a.count != b.count:
        return False
    if a.loss is not None and b.loss is not None:
        return True
    ours, theirs = map(_weights_in_pass, (a, b))  # a batch loss may return weights of its own
    return ours is theirs if ours is None or theirs is None else torch.equal(ours, theirs)


def _same_batches(a: Objective, b: Objective) -> bool:
    """Whether the same examples share a batch."""
    return (a.batch_size, a.seed, a.regroups) == (b.batch_size, b.seed, b.regroups)


def _weights_in_pass(objective: Objective) -> Tensor | None:
    """The weights of the examples, or tokens, as they are in the mean."""
    name, tensor = next(iter(objective.point().items()))
    return objective.directional_derivatives([{name: torch.zeros_like(tensor)}]).weights


def _mean_target(setting: Setting, point: Params) -> Params:
    """The target of the equations again, as the mean over groups of draws."""
    if setting.plain is None:
        target = endpoint_target(setting.objective, params=point)
    else:
        target = difference_target(
            setting.objective, setting.plain, params=point, groups=setting.groups
        )
    vectors = target.points[0].vectors
    return {n: torch.stack([vector[n] for vector in vectors]).mean(0) for n in vectors[0]}
