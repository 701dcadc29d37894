"""Targets, that is, what is to be explained, and the equations written from them.

The target of the endpoint, −∇L, is here; those of `difference` and `trajectory` have their modules.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tacit.equations.alternatives import leave_unexplained, other_families, write_alternatives
from tacit.equations.blocks import Block
from tacit.equations.candidates import (
    BoundCandidates,
    Candidates,
    ScaledByTime,
    check_candidates,
    check_readable,
)
from tacit.equations.equations import Equations, stack
from tacit.equations.near_zero import find_near_zero
from tacit.equations.points import Setting, TargetPoint
from tacit.equations.rows import write_blocks, write_means
from tacit.equations.sources import PointFacts, Source
from tacit.equations.target_files import load_target, save_target
from tacit.equations.trajectory import GROUPS
from tacit.errors import InputError
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import Params, Scope, entries, norm, shorten
from tacit.objective.passes import PassResult
from tacit.objective.randomness import split_draws
from tacit.objective.ranks import Ranks, current_ranks, on_its_ranks
from tacit.regularizers.family import Regularizer


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
        return self.candidates.bind(self.point.params, self.rows, **self.point.binding)


def origin_of(fit: Any, what: str) -> Origin:
    """What the equations of a fit were written from; refused where that was not stored."""
    equations = getattr(fit, "equations", None)
    if not isinstance(equations, Equations):
        raise InputError(f"{what} was given a {type(fit).__name__}: pass what tacit.fit returns.")
    if equations.origin is None:
        raise InputError(
            f"{what} needs the objective, which targets and equations from a file or a pickle, "
            "stacks and parts of equations do not have. Write the equations again, and fit those."
        )
    return equations.origin


@dataclass(frozen=True, eq=False)
class Target:
    """What is to be explained, at one or several points.

    Writing equations from a target takes no pass over the data, so that many families can be
    tried; except for other known penalties in a flow (`rk4`), which is then computed again. A
    trajectory has one source with a point per step; epochs have one source per point.
    """

    setting: Setting
    points: tuple[TargetPoint, ...]

    @property
    def ranks(self) -> Ranks:
        """The processes that share the parameters."""
        return self.setting.ranks

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the target to a file (safetensors): vectors, points, floors and what they are of.

        It takes one vector in float64 and the parameters per point and group of draws. Where
        processes share the rows of parameters, none has a whole target: save its equations.
        """
        if self.ranks.shards is not None:
            raise InputError(
                "each process has some rows of this target, and a file needs all: save equations "
                "written from it (Equations.save), in one of the processes."
            )
        save_target(self.setting, self.points, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Target":
        """Read a target that `save` wrote, on any machine; a damaged or made-up file is refused.

        It has no objective, so that error bars for the choice of examples, and validation, need
        the target computed again. Candidates that depend on data bring their own objective.
        """
        return Target(*load_target(path))

    @on_its_ranks
    def equations(
        self,
        regularizers: Regularizer | Sequence[Regularizer],
        *,
        known: Mapping[Regularizer, float] | None = None,
        rows: Scope = None,
        scaled_by_time: ScaledByTime = False,
    ) -> Equations:
        """Equations Σ λ_k ∇R_k = target at every point.

        Args:
            regularizers: candidates whose strengths are estimated.
            known: penalties that training did apply, with their strengths; their gradients are
                subtracted from the target. A difference has none. A flow (`rk4`) follows them, by
                default those of `trajectory_target`; with others it is computed again.
            rows: which parameters' equations to use; by default all.
            scaled_by_time: True, or the regularizers whose columns are multiplied by each step's
                time; for trajectories, see `trajectory_equations`.
        """
        _check_known_in_file(self.setting, regularizers, known)
        followed = self.setting.followed
        candidates = check_candidates(regularizers, followed if known is None else known)
        candidates = candidates.scaled_by_time(scaled_by_time)
        if any(candidates.per_time) and not all(point.time for point in self.points):
            raise InputError(
                f"scaled_by_time is {scaled_by_time!r}, but {self.setting.mode} equations have no "
                "steps: leave it out, or pass a target of trajectory_target."
            )
        if candidates.known and self.setting.mode == "difference":
            raise InputError(
                "known penalties are the same with and without the technique: leave known= out."
            )
        if candidates.known and self.setting.mode == "accumulated":
            raise InputError(
                "known penalties that training did apply acted at every point of the path, and not "
                "as a difference between its ends: leave known= out, or pass accumulated_target an "
                "objective whose loss has them."
            )
        for point in self.points:
            point.check_unchanged()
        setting, points = self.setting, self.points
        if setting.follow is not None and candidates.known != followed:
            points = setting.follow(candidates.known)
            setting = replace(setting, followed=candidates.known)
        return write_equations(setting, points, candidates, rows)


def _check_known_in_file(setting: Setting, regularizers: Any, known: Any) -> None:
    """Refuse what a target from a file, whose reference followed a flow, cannot be used for."""
    if setting.in_file is None:
        return
    names = shorten(setting.in_file) or "none"
    if known:
        raise InputError(
            f"known penalties are part of the flow in this target from a file ({names}): leave "
            "known= out, or compute the target again with trajectory_target(…, known=…)."
        )
    listed = regularizers if isinstance(regularizers, Sequence) else [regularizers]
    if setting.in_file and any(getattr(r, "with_known", None) for r in listed):
        raise InputError(
            f"the flow of this target from a file has known penalties ({names}), which "
            "gradient_norm has to have too: pass gradient_norm(objective, known={…})."
        )


@on_its_ranks
def write_equations(
    setting: Setting, points: Iterable[TargetPoint], candidates: Candidates, rows: Scope
) -> Equations:
    """The equations of all points, read one at a time."""
    if setting.mode == "trajectory" and setting.computed_from:
        candidates = candidates.of_flow(setting.objective, followed=setting.followed is not None)
    current_ranks().check_same(candidates.described(rows), "the candidates")
    check_readable((*candidates.estimated, *candidates.known))  # before splines look at weights
    if isinstance(points, Sequence) and points:
        ends = [end for point in points for end in (point.start, point.params) if end is not None]
        candidates.place_knots(ends, read=dict)
    parts: list[Equations] = []
    means: list[Block] = []
    piece: list[tuple[BoundCandidates, Sequence[Params]]] = []
    others = point = None
    for number, point in enumerate(points):
        others = others or other_families(point.params, point.metric)
        bound = candidates.bind(point.params, rows, **point.binding)
        beside = others if setting.diagnosed and number % setting.every == 0 else None
        parts.append(_equations_at(point, bound, candidates, setting, beside))
        piece += [(bound, point.vectors)] if setting.piece else []
        if piece and len(piece) == setting.piece:
            means += _means_of(piece, number, epochs=setting.epochs)
            piece = []
    if point is None:
        raise InputError("the target has no points: pass at least one.")
    equations = stack(parts)
    if setting.mode == "trajectory" and not leave_unexplained(equations):
        equations = replace(equations, alternatives=(), other_families=())
    if len(parts) > 1 and not setting.epochs:
        equations = _as_steps(equations)
    only_point = replace(point, vectors=()) if len(parts) == 1 else None
    origin = Origin(setting, candidates, rows, only_point) if setting.computed_from else None
    return replace(equations, origin=origin, means=tuple(means))


def _equations_at(
    point: TargetPoint,
    bound: BoundCandidates,
    candidates: Candidates,
    setting: Setting,
    others: Candidates | None,
) -> Equations:
    """The equations of one point, beside other families where these leave something unexplained."""
    blocks = write_blocks(bound, point.vectors, floors=point.floors)
    near_zero: dict[str, Any] = {}
    if setting.diagnosed and (setting.epochs or setting.mode == "endpoint"):
        near_zero = find_near_zero(candidates, blocks, bound, point.vectors, **point.binding)
    source = Source(
        mode=setting.mode,
        loss_value=point.loss_value,
        gradient_norm=point.gradient_norm,
        epoch=setting.epochs,
        sampled=setting.sampled,
        parameters=entries({name: point.params[name] for name in bound.rows}),
        tensors=len(bound.rows),
        known={
            **(setting.in_file or {}),
            **{r.name: float(strength) for r, strength in candidates.known.items()},
        },
        scale=setting.scale,
        counts=bound.counts,
        **near_zero,
        **vars(point.facts) | {"dropout": point.facts.dropout and candidates.are_of_weights},
        **setting.describe(point),
    )
    names = bound.columns.names
    equations = Equations(bound.families, names, setting.groups, tuple(blocks), (source,))
    # Whether the candidates explain a trajectory is known after all of its points.
    if others and (setting.mode == "trajectory" or leave_unexplained(equations)):
        alternatives = tuple(write_alternatives(bound, others, point))
        families = tuple(r.name for r in others.estimated) if alternatives else ()
        return replace(equations, alternatives=alternatives, other_families=families)
    return equations


def _as_steps(equations: Equations) -> Equations:
    """Equations of several sources as those of the steps of one."""
    sources = equations.sources
    in_all = [n for n in sources[-1].unreached if all(n in s.unreached for s in sources)]
    source = replace(
        sources[-1],
        steps=len(sources),
        gradient_norm=math.sqrt(sum(s.gradient_norm**2 for s in sources) / len(sources)),
        burn_in=math.hypot(*(s.burn_in for s in sources)),
        step_sizes=tuple(size for s in sources for size in s.step_sizes),
        unreached=tuple(in_all),
    )
    blocks, alternatives = (
        tuple(replace(block, source=0, step=block.source) for block in part)
        for part in (equations.blocks, equations.alternatives)
    )
    return replace(equations, blocks=blocks, alternatives=alternatives, sources=(source,))


def _means_of(
    piece: Sequence[tuple[BoundCandidates, Sequence[Params]]], last: int, *, epochs: bool
) -> list[Block]:
    """The means over every second of these points, each labelled with its first point."""
    first, label = last - len(piece) + 1, "source" if epochs else "step"
    return [
        replace(block, **{label: first + offset})
        for offset in (0, 1)
        if len(piece[offset::2]) > 1
        for block in write_means(piece[offset::2])
    ]


@on_its_ranks
def endpoint_target(objective: Objective, *, params: Mapping[str, Tensor] | None = None) -> Target:
    """−∇L(θ) at one point, by default at the model's current parameters: one pass over the data."""
    params = check_objective(objective).point(params)
    read_floors = objective.begin_rounding(params)
    groups = 1
    if objective.batch_norm == "batch" and objective.random:
        groups = min(GROUPS, independent_draws(objective))
    results = group_gradients(objective, params, groups)
    gradients = [result.derivative for result in results]
    mean = gradients[0]
    if groups > 1:
        mean = {n: sum((g[n] for g in gradients[1:]), mean[n]) / groups for n in params}
    gradient_norm, value = norm(mean), sum(result.value for result in results) / groups
    floors = read_floors()
    vectors = [{name: tensor.neg_() for name, tensor in g.items()} for g in gradients]
    unreached = tuple(n for n in params if all(n in result.unreached for result in results))
    facts = PointFacts(unreached=unreached)
    point = TargetPoint(params, vectors, floors, gradient_norm, value, facts=facts)
    return Target(Setting("endpoint", objective, groups=groups), (point,))


def group_gradients(objective: Objective, params: Params, groups: int) -> list[PassResult]:
    """L and ∇L averaged over each group of draws; only one for an objective without draws."""
    if not objective.random or groups == 1:
        return [objective.differentiate(params)]
    if independent_draws(objective) < groups:
        pairs, needed = (" of mirrored pairs", 2 * groups) if objective.paired else ("", groups)
        raise InputError(
            f"{objective.draws} draws cannot make {groups} groups{pairs}: pass "
            f"Objective(…, draws={needed}) or more, or fewer groups."
        )
    return [
        objective.differentiate(params, draws=draws)
        for draws in split_draws(objective.draws, groups, paired=objective.paired)
    ]


def independent_draws(objective: Objective) -> int:
    """Number of independent draws: all, or one per mirrored pair."""
    return objective.draws // 2 if objective.paired else objective.draws


def endpoint_equations(
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    params: Mapping[str, Tensor] | None = None,
    known: Mapping[Regularizer, float] | None = None,
    rows: Scope = None,
) -> Equations:
    """Equations Σ λ_k ∇R_k(θ) = −∇L(θ) at one point: the total effect of everything.

    The short form of `endpoint_target(objective).equations(regularizers)`.

    Trap: they assume that θ is a stationary point of L + R. Where training stopped early or
    noisily, λ mixes regularization with unfinished optimisation.

    Args:
        objective: the loss, without any penalty.
        regularizers: candidates whose strengths are estimated.
        params: the point; by default the model's current parameters.
        known: penalties that training did apply, with their strengths; their gradients are
            subtracted from the target.
        rows: which parameters' equations to use; by default all.
    """
    candidates = check_candidates(regularizers, known)  # before the pass over the data
    target = endpoint_target(objective, params=params)
    return write_equations(target.setting, target.points, candidates, rows)
