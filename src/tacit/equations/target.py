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
    """Regularizers whose columns are means over an epoch, and what has these columns."""
    unsettled: Mapping[str, float] = field(default_factory=dict)
    """See `Source.unsettled`."""


@dataclass(frozen=True, eq=False)
class Origin:
    """What equations in memory were written from; files and pickles do not have it."""

    setting: Setting
    candidates: Candidates
    rows: Scope
    points: tuple[Params, ...]
    fingerprints: tuple[tuple[float, ...], ...]

    def bind(self) -> BoundCandidates:
        """The candidates at the point of the equations; refused where there are several points.

        The point may be the model's live weights: it is refused where they have changed.
        """
        if len(self.points) > 1:
            raise InputError(
                f"the equations are of {len(self.points)} points: this needs equations of one "
                "point. Write equations of each endpoint, and use them one at a time."
            )
        if fingerprint(self.points[0]) != self.fingerprints[0]:
            raise InputError(
                "the weights have changed since the equations were written, probably by further "
                "training: write the equations again, or write them with params= set to a copy of "
                "the weights, as in {n: p.detach().clone() for n, p in model.named_parameters()}."
            )
        return self.candidates.bind(self.points[0], self.rows)


def origin_of(fit: Any, what: str) -> Origin:
    """What the equations of a fit were written from; refused where they do not know it."""
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
    params: list[Params] = []
    for number, point in enumerate(points):
        bound = candidates.bind(point.params, rows, averaged=point.averaged)
        place = {"source": number} if epochs else {"step": number}
        written = write_blocks(bound, point.vectors, floors=point.floors)
        blocks += [replace(block, **place) for block in written]
        gradient_norms.append(point.gradient_norm)
        params.append(point.params)
        if epochs or not sources:
            sources.append(
                Source(
                    mode=setting.mode,
                    loss_value=point.loss_value,
                    gradient_norm=point.gradient_norm,
                    unsettled=dict(point.unsettled),
                    epoch=epochs,
                    **setting.objective.describe(point.params),
                    **bound.describe(),
                )
            )
    if bound is None:
        raise InputError("the target has no points: pass at least one.")
    if not epochs and len(params) > 1:
        mean_norm = math.sqrt(sum(n**2 for n in gradient_norms) / len(gradient_norms))
        facts = {**setting.objective.describe(params[-1]), "gradient_norm": mean_norm}
        sources = [replace(sources[0], steps=len(params), **facts)]
    origin = Origin(setting, candidates, rows, tuple(params), tuple(map(fingerprint, params)))
    return Equations(
        bound.families, bound.columns.names, setting.groups, tuple(blocks), tuple(sources), origin
    )
