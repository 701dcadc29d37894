"""What is to be explained: vectors, the points they were taken at, and where they came from."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tacit.equations.equations import Block, Equations, Source
from tacit.equations.rows import (
    BoundCandidates,
    Candidates,
    check_candidates,
    write_blocks,
)
from tacit.errors import InputError
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, fingerprint
from tacit.regularizers.family import Regularizer

Mode = Literal["endpoint", "difference", "trajectory"]


@dataclass(frozen=True, eq=False)
class Setting:
    """What a target was computed from."""

    mode: Mode
    objective: Objective
    """The objective; the technique, for a difference."""
    plain: Objective | None = None
    """The objective without the technique, for a difference."""
    groups: int = 1
    """Groups of draws, each with a target of its own."""


@dataclass(frozen=True, eq=False)
class TargetPoint:
    """The target at one point: one vector per group of draws, with its facts."""

    params: Params
    vectors: Sequence[Params]
    """In float64."""
    floors: Mapping[str, float]
    """Norm, by tensor, of a vector that would be only rounding."""
    gradient_norm: float
    loss_value: float | None = None
    averaged: Mapping[Regularizer, Regularizer] = field(default_factory=dict)
    """For regularizers whose columns are means over an epoch, one that returns these means."""
    unsettled: Mapping[str, float] = field(default_factory=dict)
    """See `Source.unsettled`."""
    fingerprint: tuple[float, ...] = ()
    """Of the parameters when the target was computed; they may be the model's live weights."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", self.fingerprint or self._current_fingerprint())

    def check_unchanged(self) -> None:
        """Refuse parameters that have changed since the target was computed."""
        if self._current_fingerprint() != self.fingerprint:
            raise InputError(
                "the weights have changed since the target was computed, probably by further "
                "training: write the equations again, or pass params= a copy of the weights, as in "
                "{n: p.detach().clone() for n, p in model.named_parameters()}, when you write them."
            )

    def _current_fingerprint(self) -> tuple[float, ...]:
        return fingerprint(self.params)


@dataclass(frozen=True, eq=False)
class Origin:
    """What equations in memory were written from; files and pickles do not have it."""

    setting: Setting
    candidates: Candidates
    rows: Scope
    point: TargetPoint | None
    """Without its vectors; None for equations of several points."""

    def bind(self) -> BoundCandidates:
        """The candidates at the point, which must be one and unchanged."""
        if self.point is None:
            raise InputError("the equations are of several points: pass equations of one point.")
        self.point.check_unchanged()
        return self.candidates.bind(self.point.params, self.rows)


def origin_of(fit: Any, what: str) -> Origin:
    """What the equations of a fit were written from; refused where that was not stored."""
    equations = getattr(fit, "equations", None)
    if not isinstance(equations, Equations):
        raise InputError(f"{what} was given a {type(fit).__name__}: pass what tacit.fit returns.")
    if equations.origin is None:
        raise InputError(
            f"{what} needs the objective, which the equations of this fit do not have: they were "
            "read from a file or a pickle, stacked, or cut from others. Write the equations again, "
            "for example with endpoint_equations, and fit those."
        )
    return equations.origin


@dataclass(frozen=True, eq=False)
class Target:
    """What is to be explained, at one or several points.

    Writing equations from a target takes no pass over the data, so that many families can be
    tried. A trajectory has one source with a point per step; epochs have one source per point.
    """

    setting: Setting
    points: tuple[TargetPoint, ...]
    epochs: bool = False
    """Whether every point is an epoch of a run, and a source of its own."""

    def equations(
        self,
        regularizers: Regularizer | Sequence[Regularizer],
        *,
        known: Mapping[Regularizer, float] | None = None,
        rows: Scope = None,
    ) -> Equations:
        """Equations Σ λ_k ∇R_k = target at every point.

        Args:
            regularizers: candidates whose strengths are estimated.
            known: penalties that training did apply, with their strengths; their gradients are
                subtracted from the target. A difference has none.
            rows: which parameters' equations to use; by default all.
        """
        candidates = check_candidates(regularizers, known)
        if candidates.known and self.setting.mode == "difference":
            raise InputError(
                "known penalties are the same with and without the technique, so that they are not "
                "part of a difference: leave known= out."
            )
        for point in self.points:
            point.check_unchanged()
        return write_equations(self.setting, self.points, candidates, rows, epochs=self.epochs)


def write_equations(
    setting: Setting,
    points: Iterable[TargetPoint],
    candidates: Candidates,
    rows: Scope,
    *,
    epochs: bool = False,
) -> Equations:
    """The equations of all points, read one at a time."""
    blocks: list[Block] = []
    sources: list[Source] = []
    gradient_norms: list[float] = []
    bound: BoundCandidates | None = None
    point: TargetPoint | None = None
    for number, point in enumerate(points):
        bound = candidates.bind(point.params, rows, averaged=point.averaged)
        label = {"source": number} if epochs else {"step": number}
        written = write_blocks(bound, point.vectors, floors=point.floors)
        blocks += [replace(block, **label) for block in written]
        gradient_norms.append(point.gradient_norm)
        if epochs or not sources:
            sources.append(
                Source(
                    mode=setting.mode,
                    loss_value=point.loss_value,
                    gradient_norm=point.gradient_norm,
                    unsettled=dict(point.unsettled),
                    epoch=epochs,
                    parameters=sum(point.params[name].numel() for name in bound.rows),
                    tensors=len(bound.rows),
                    known=bound.known_strengths,
                    **setting.objective.describe(point.params),
                )
            )
    if bound is None or point is None:
        raise InputError("the target has no points: pass at least one.")
    count = len(gradient_norms)
    if not epochs and count > 1:
        mean_norm = math.sqrt(sum(n**2 for n in gradient_norms) / count)
        facts = {**setting.objective.describe(point.params), "gradient_norm": mean_norm}
        sources = [replace(sources[0], steps=count, **facts)]
    only_point = replace(point, vectors=()) if count == 1 else None
    origin = Origin(setting, candidates, rows, only_point)
    return Equations(
        bound.families, bound.columns.names, setting.groups, tuple(blocks), tuple(sources), origin
    )
