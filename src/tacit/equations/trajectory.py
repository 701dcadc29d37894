"""The trajectory equations: what force besides the loss gradient moved the weights?"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.equations.equations import Equations, PointFacts
from tacit.equations.flow import Flow, Reference, euler, rk4
from tacit.equations.rows import check_candidates, check_known
from tacit.equations.target import Setting, Target, TargetPoint, write_equations
from tacit.errors import InputError, check_number, check_type
from tacit.objective.models import BatchNorm, own_names
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import (
    Params,
    Scope,
    check_alike,
    check_finite,
    coarsest_dtype,
    norm,
    square_norm,
    to_float64,
)
from tacit.regularizers.family import Regularizer

PIECE = 8
"""Steps over which the target of a trajectory counts as the same."""
MOST_ALTERNATIVES = 256
"""About so many steps of a trajectory have equations with other families."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Points θ_t, displacements θ_{t+1} − θ_t, and the flow time that each displacement took.

    The time is η for a step of gradient descent, η·steps for an epoch, η/(1−β) for momentum β
    after burn-in. Trap: Adam's steps do not follow the gradient flow of L; see `record`.
    """

    points: Sequence[Params]
    displacements: Sequence[Params]
    times: Sequence[float]
    young_momentum: Sequence[float] = ()
    """The part of each time by which η/(1−β) overstates steps of a young momentum buffer."""
    batch_norm: BatchNorm | None = None
    """Which statistics batch norm used in these steps, where a recorder saw it."""
    clipped: float = 0.0
    """See `PointFacts.clipped`."""
    carried: Sequence[Params] = ()
    """What momentum carried into each displacement from gradients at earlier points, where a
    recorder saw it: without it, a step is its own gradient times its time."""
    momentum: float = 0.0
    """The momentum β of these steps, where a recorder saw it."""
    updates: int = 1
    """The most updates in one displacement, where a recorder saw them."""

    def __post_init__(self) -> None:
        parts = (self.points, self.displacements, self.times)
        for part in parts:
            check_type("a part of a trajectory", part, Sequence, "a list, with one entry per step")
        points, displacements, times = (len(part) for part in parts)
        if not points == displacements == times > 0:
            raise InputError(
                f"a trajectory of {points} points, {displacements} displacements and {times} times:"
                " pass one of each for at least one step, or use Trajectory.from_positions."
            )
        for step, (point, displacement, time) in enumerate(zip(*parts, strict=True)):
            check_time(time)
            _check_like(point, self.points[0], what=f"point {step}")
            _check_like(displacement, self.points[0], what=f"displacement {step}")

    def __len__(self) -> int:
        return len(self.points)

    @classmethod
    def from_positions(
        cls, params: Iterable[Params], step_sizes: float | Sequence[float]
    ) -> "Trajectory":
        """Displacements from successive positions, in float64; one step size, or one per step."""
        positions = list(params)
        steps = len(positions) - 1
        if steps < 1:
            raise InputError(
                f"{len(positions)} position(s) have no displacement: pass two or more."
            )
        times = list(step_sizes) if isinstance(step_sizes, Iterable) else [step_sizes] * steps
        if len(times) != steps:
            raise InputError(
                f"{len(positions)} positions make {steps} steps, but {len(times)} step sizes were "
                "given: pass one per step, or a single number."
            )
        for number, position in enumerate(positions):
            _check_like(position, positions[0], what=f"position {number}")
        displacements = []
        for number, (start, end) in enumerate(pairwise(positions)):
            if any(start[n].data_ptr() == end[n].data_ptr() for n in start if start[n].numel()):
                raise InputError(
                    f"positions {number} and {number + 1} share their memory: keep copies, as in "
                    "{n: p.detach().clone() for n, p in model.named_parameters()}."
                )
            displacements.append(
                {n: to_float64(end[n].detach()) - to_float64(start[n].detach()) for n in start}
            )
        return cls(positions[:-1], displacements, times)

    def halved(self) -> "Trajectory":
        """The same points with steps of half the size: half the displacement in half the time.

        A step of gradient descent is −η times a force at its point, so that this is what half the
        step size would have done there. Fits of both, compared with a flow (`rk4`), tell how much
        of a strength is due to the finite step: see `Fit.with_halved`.

        Trap: several updates, or momentum, are not so; they are refused where a recorder saw them.
        """
        if self.momentum or self.updates > 1:
            what = (
                f"momentum {self.momentum:g}" if self.momentum else f"{self.updates} updates each"
            )
            raise InputError(
                f"steps with {what} cannot be halved afterwards: they depend on forces at earlier "
                "points. Train with half the step size, and record that."
            )
        halves = [{n: moved / 2 for n, moved in step.items()} for step in self.displacements]
        return replace(self, displacements=halves, times=[time / 2 for time in self.times])


def check_time(time: float) -> None:
    """Refuse a flow time that is not a finite number above zero."""
    check_number("the time of a step (η, or η/(1−β) with momentum β)", time, above=0)


def _check_like(vector: Params, reference: Params, *, what: str) -> None:
    """Refuse other names or shapes than the reference's, and values that are not finite."""
    check_alike(vector, reference, what=what)
    check_finite(vector, what=what)


def trajectory_target(
    objective: Objective,
    trajectory: Trajectory,
    *,
    reference: Reference = euler,
    known: Mapping[Regularizer, float] | None = None,
) -> Target:
    """(reference − observed displacement)/time at every step; holds one float64 vector per step.

    `trajectory_equations` reads the steps one at a time instead. `known` are penalties that
    training did apply, with their strengths: the reference follows L + Σ known, and equations of
    this target need no known=.
    """
    followed = check_known(known)
    follow = partial(_target_points, objective, trajectory, reference)
    points = tuple(follow(followed))
    piece, every = _piece(trajectory, reference), _every(trajectory)
    setting = Setting("trajectory", objective, piece=piece, every=every)
    if reference is euler and not followed:  # known penalties are subtracted by the equations
        return Target(setting, points)
    return Target(replace(setting, followed=followed, follow=follow), points)


def trajectory_equations(
    objective: Objective,
    trajectory: Trajectory,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    reference: Reference = euler,
    known: Mapping[Regularizer, float] | None = None,
    rows: Scope = None,
) -> Equations:
    """Equations Σ λ_k ∇R_k(θ_t) = (reference − observed displacement)/time at every step.

    The reference is where the unregularised flow would have gone: `euler` for what a step adds
    to −η∇L, `rk4()` for what discrete steps add to gradient flow. Known penalties are part of the
    flow: over several updates a penalty acts at other points than the first.

    Trap: the target is a small difference. In float32 it is lost in rounding at small steps, and
    the fit then carries the Problem "no signal".

    Args:
        objective: the loss, without any penalty.
        trajectory: points, displacements and times.
        regularizers: candidates whose strengths are estimated.
        reference: the displacement to compare with, reference(objective, point, time). The
            objective's gradient is that of L + Σ known.
        known: penalties that training did apply, with their strengths. The reference follows
            L + Σ known, and `gradient_norm(objective)` is then ‖∇(L + Σ known)‖².
        rows: which parameters' equations to use; by default all.
    """
    candidates = check_candidates(regularizers, known)
    # One explicit step is linear in the gradient: the penalties' part is subtracted from it.
    followed = None if reference is euler else candidates.known
    points = _target_points(objective, trajectory, reference, followed or {})
    piece, every = _piece(trajectory, reference), _every(trajectory)
    setting = Setting("trajectory", objective, followed=followed, piece=piece, every=every)
    return write_equations(setting, points, candidates, rows)


def _target_points(
    objective: Objective,
    trajectory: Trajectory,
    reference: Reference,
    known: Mapping[Regularizer, float],
) -> Iterator[TargetPoint]:
    """The target of every step, one at a time; the reference follows L and the known penalties."""
    check_objective(objective)
    makers = "tacit.Trajectory(points, displacements, times) or recorder.trajectory()"
    check_type("trajectory", trajectory, Trajectory, makers)
    if not callable(reference) or reference is rk4:
        raise InputError(
            f"reference is {reference!r}: pass tacit.equations.euler or tacit.rk4(substeps=10)."
        )
    if objective.batch_norm and trajectory.batch_norm not in (None, objective.batch_norm):
        changed = "changed" if trajectory.batch_norm == "batch" else "did not change"
        raise InputError(
            f"batch_norm={objective.batch_norm!r}, but the running statistics {changed} while the "
            f"steps were recorded: training used batch_norm={trajectory.batch_norm!r}; pass that."
        )
    for step in _steps(trajectory, without_momentum=reference is euler):
        point, time = step.point, step.time
        params = objective.point(point, what="a trajectory's point")
        displacement = own_names(objective.model, step.displacement)
        flow = Flow(objective, known)
        expected = reference(flow, params, time)
        if known and not flow.followed:
            raise InputError(
                "the reference did not ask for objective.gradient(…), which has the known "
                "penalties: follow that gradient, or leave known= out."
            )
        _check_like(expected, params, what="the reference displacement")
        vector = {n: _rate_beyond(expected[n], displacement[n], time) for n in params}
        floats = [t for t in point.values() if t.is_floating_point()]
        eps = torch.finfo(coarsest_dtype(*params.values(), *floats)).eps
        floors = {n: eps * math.sqrt(square_norm(p)) / time for n, p in params.items()}
        rate = norm(expected) / time
        facts = PointFacts(
            unreached=flow.unreached(params),
            burn_in=step.young_momentum * rate,
            clipped=trajectory.clipped,
            step_size=0.0 if reference is euler else time,
            memory=step.memory,
        )
        yield TargetPoint(params, [vector], floors, rate, facts=facts)


def _piece(trajectory: Trajectory, reference: Reference) -> int:
    """See `Setting.piece`: steps whose momentum is taken out show the whole noise of a batch."""
    carried = isinstance(trajectory, Trajectory) and trajectory.carried
    return PIECE if reference is euler and carried else 0


def _every(trajectory: Trajectory) -> int:
    """See `Setting.every`."""
    return 1 + len(trajectory) // MOST_ALTERNATIVES if isinstance(trajectory, Trajectory) else 1


class _Step(NamedTuple):
    """One step of a trajectory."""

    point: Params
    displacement: Params
    time: float
    young_momentum: float = 0.0
    memory: float = 0.0


def _steps(trajectory: Trajectory, *, without_momentum: bool) -> Iterator[_Step]:
    """The steps, either as they moved, or free of what momentum carried over from earlier ones.

    Without it the displacement is that of the step's own gradient, from the first step on: its
    noise does not depend on that of earlier steps, which moved the weights already.
    """
    steps = zip(trajectory.points, trajectory.displacements, trajectory.times, strict=True)
    if without_momentum and trajectory.carried:
        for (point, displacement, time), carried in zip(steps, trajectory.carried, strict=True):
            own = {
                n: to_float64(moved.detach()) - carried[n].to(moved.device)
                for n, moved in displacement.items()
                if n in carried
            }
            yield _Step(point, {**displacement, **own}, time)
        return
    young = trajectory.young_momentum or [0.0] * len(trajectory)
    memory = 1 / (1 - trajectory.momentum) if trajectory.momentum else 0.0
    for step, missing in zip(steps, young, strict=True):
        yield _Step(*step, missing, memory)


def _rate_beyond(expected: Tensor, displacement: Tensor, time: float) -> Tensor:
    """(expected − observed displacement)/time, in float64."""
    expected = to_float64(expected)
    return (expected - to_float64(displacement.detach()).to(expected.device)) / time
