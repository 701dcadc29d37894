"""The influence of examples on the columns of the design, where those are means over examples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tacit.equations.rows import BoundCandidates, Candidates
from tacit.errors import InputError
from tacit.objective.objective import Objective
from tacit.objective.params import Params
from tacit.objective.randomness import split_draws
from tacit.regularizers import Regularizer
from tacit.uncertainty.directions import Directions, residual

if TYPE_CHECKING:
    from tacit.uncertainty.linear_fit import Solved


@dataclass(frozen=True, eq=False)
class Drift:
    """What moves with the examples besides the loss gradient."""

    objective: Objective
    plain: Objective | None
    params: Params
    rows: Sequence[str]
    candidates: Candidates
    bound: BoundCandidates
    groups: int = 1
    """Groups of draws that the target is the mean over."""

    def reads(self, regularizer: Regularizer) -> bool:
        """Whether a regularizer is a mean over the scored examples themselves."""
        own = [o for o in (self.objective, self.plain) if o is not None]
        return any(_same_data(regularizer.objective, o) for o in own)

    def depends(self) -> Iterator[tuple[Regularizer, float | None, list[int]]]:
        """Regularizers that depend on data, a known strength or None, and their columns."""
        start = 0
        for regularizer, family in zip(self.candidates.estimated, self.bound.families, strict=True):
            if regularizer.influence is not None:
                yield regularizer, None, list(range(start, start + family.size))
            start += family.size
        for regularizer, strength in self.candidates.known.items():
            if regularizer.influence is not None:
                yield regularizer, strength, []

    def target(self) -> Params:
        """The target, before known penalties are taken off."""
        own = self._gradient(self.objective)
        if self.plain is None:
            return {n: -g for n, g in own.items()}
        other = self._gradient(self.plain)
        return {n: g - other[n] for n, g in own.items()}

    def _gradient(self, objective: Objective) -> Params:
        """The mean over groups of draws, each with equal weight, as in the target."""
        if not objective.training:
            return objective.gradient(self.params)
        shared = split_draws(objective.draws, self.groups, paired=objective.paired)
        parts = [objective.value_and_gradient(self.params, draws=own)[1] for own in shared]
        return {n: torch.stack([part[n] for part in parts]).mean(0) for n in parts[0]}


def design_scores(
    drift: Drift, directions: Directions, solved: "Solved", weights: Tensor | None
) -> tuple[Tensor, tuple[str, ...]]:
    """What the design adds to the influence of every example, centred; notes on what it cannot.

    dλ̂ = M[dΦᵀr + Φᵀ(db − dΦ λ̂)] with M = (ΦᵀΦ)⁻¹ and r = b − Φλ̂. For column m and the
    directions v_j of ΦM that is M_jm ⟨dφ_m, r⟩ − λ_m ⟨dφ_m, v_j⟩; a known penalty of strength s
    adds −s ⟨dφ, v_j⟩.
    """
    free = solved.free.nonzero()[:, 0].tolist()
    total = torch.zeros(1, len(free), dtype=torch.float64)
    depends = list(drift.depends())
    if not depends:
        return total, ()
    fixed = [r.name for r, _, _ in depends if not solved.determined or not drift.reads(r)]
    moving = [d for d in depends if d[0].name not in fixed]
    notes = tuple(f"columns of {name} held fixed" for name in fixed)
    if not moving:
        return total, notes
    check_order(drift.objective)
    left = residual(drift.params, drift.bound, drift.rows, drift.target(), solved.strengths)
    for regularizer, strength, columns in moving:
        assert regularizer.influence is not None
        found = regularizer.influence(drift.params, [*directions, left])
        along, across = found[:, :-1], found[:, -1]
        if strength is None:
            own = solved.inverse[free][:, columns]
            part = across @ own.T - along @ solved.strengths[columns]
        else:
            part = -strength * along[:, :, 0]
        total = total + part
    mean = total.mean(0) if weights is None else weights @ total / weights.sum()
    return total - mean, notes


def _same_data(a: Objective | None, b: Objective) -> bool:
    if a is None or a is b:
        return a is b
    if a.loss is None or b.loss is None:  # units may have weights of their own
        return False
    return identical(a.data, b.data) and a.weights is b.weights and a.count == b.count


def identical(a: Any, b: Any) -> bool:
    """Whether two objectives were given the same data, or tuples of the same tensors."""
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
    return a is b


def check_order(objective: Objective, *, shuffled: bool = True) -> None:
    """Refuse data that comes in another order at every pass: examples could not be paired."""
    if not objective.repeats_order(shuffled=shuffled):
        raise InputError(
            "the data comes in another order at every pass, and examples of several passes must be "
            "paired: pass a loader that does not shuffle."
        )
