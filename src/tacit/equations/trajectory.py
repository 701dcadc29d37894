"""The trajectory equations: what force besides the loss gradient moved the weights?"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.equations.flow import Reference, euler, rk4
from tacit.equations.rows import check_candidates
from tacit.equations.target import Setting, Target, TargetPoint, write_equations
from tacit.errors import InputError
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import (
    Params,
    Scope,
    check_finite,
    coarsest_dtype,
    norm,
    square_norm,
    to_float64,
)
from tacit.regularizers.family import Regularizer


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Points θ_t, displacements θ_{t+1} − θ_t, and the flow time that each displacement took.

    The time is η for a step of gradient descent, η·steps for an epoch, η/(1−β) for momentum β
    after burn-in. Trap: Adam's steps do not follow the gradient flow of L; see `record`.
    """

    points: Sequence[Params]
    displacements: Sequence[Params]
    times: Sequence[float]

    def __post_init__(self) -> None:
        for part in (self.points, self.displacements, self.times):
            if not isinstance(part, Sequence):
                raise InputError(
                    f"a trajectory was given a {type(part).__name__}: pass three lists, of points, "
                    "displacements and times."
                )
        sizes = (len(self.points), len(self.displacements), len(self.times))
        if len(set(sizes)) > 1:
            raise InputError(
                f"a trajectory of {sizes[0]} points, {sizes[1]} displacements and {sizes[2]} "
                "times: there must be one of each per step. For positions use "
                "Trajectory.from_positions."
            )
        if not sizes[0]:
            raise InputError("a trajectory without steps: pass at least one displacement.")
        check_times(self.times)
        for step, (point, displacement) in enumerate(
            zip(self.points, self.displacements, strict=True)
        ):
            check_alike(point, self.points[0], f"point {step}")
            check_alike(displacement, self.points[0], f"displacement {step}")

    def __len__(self) -> int:
        return len(self.points)

    @classmethod
    def from_positions(
        cls, params: Iterable[Params], step_sizes: float | Sequence[float]
    ) -> "Trajectory":
        """Displacements from successive positions, in float64; one step size, or one per step."""
        positions = list(params)
        if len(positions) < 2:
            raise InputError(
                f"{len(positions)} position(s) have no displacement: pass two or more."
            )
        steps = len(positions) - 1
        times = list(step_sizes) if isinstance(step_sizes, Iterable) else [step_sizes] * steps
        if len(times) != steps:
            raise InputError(
                f"{len(positions)} positions make {steps} steps, but {len(times)} step sizes were "
                "given: pass one per step, or a single number."
            )
        for number, position in enumerate(positions):
            check_alike(position, positions[0], f"position {number}")
        displacements = []
        for number, (start, end) in enumerate(pairwise(positions)):
            if any(start[n].data_ptr() == end[n].data_ptr() for n in start if start[n].numel()):
                raise InputError(
                    f"positions {number} and {number + 1} share their memory, so they cannot "
                    "differ: keep copies, as in {n: p.detach().clone() for n, p in "
                    "model.named_parameters()}."
                )
            displacements.append(displacement_between(start, end))
        return cls(positions[:-1], displacements, times)


def check_times(times: Sequence[float]) -> None:
    """Refuse times that are not finite numbers above zero."""
    for time in times:
        if isinstance(time, bool) or not isinstance(time, Real) or not 0 < time < math.inf:
            raise InputError(
                f"a step took time {time!r}: pass a finite number above zero, such as the step "
                "size η, or η/(1−β) for momentum β."
            )


def check_alike(params: Params, first: Params, what: str) -> None:
    """Refuse parameters whose names or shapes differ from the first's, or that are not finite."""
    if not isinstance(params, Mapping):
        raise InputError(
            f"{what} of the trajectory is a {type(params).__name__}: pass a dictionary of named "
            "tensors, such as copies of dict(model.named_parameters())."
        )
    if any(not isinstance(tensor, Tensor) for tensor in params.values()):
        raise InputError(
            f"{what} of the trajectory holds values that are not tensors: pass tensors."
        )
    if params.keys() != first.keys() or any(params[n].shape != first[n].shape for n in first):
        raise InputError(
            f"{what} of the trajectory differs from the first point: all points must be of one "
            "model, with the same names and shapes."
        )
    check_finite(params, what=f"{what} of the trajectory")


def displacement_between(start: Params, end: Params) -> Params:
    """End − start, in float64."""
    return {n: to_float64(end[n].detach()) - to_float64(start[n].detach()) for n in start}


def trajectory_target(
    objective: Objective, trajectory: Trajectory, *, reference: Reference = euler
) -> Target:
    """(reference − observed displacement)/time at every step; holds one float64 vector per step.

    `trajectory_equations` reads the steps one at a time instead.
    """
    _check_trajectory(objective, trajectory, reference)
    points = tuple(_target_points(objective, trajectory, reference))
    return Target(Setting("trajectory", objective), points)


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
    to −η∇L, `rk4()` for what discrete steps add to gradient flow.

    Trap: the target is a small difference. In float32 it is lost in rounding at small steps, and
    the fit then carries the Problem "no signal".

    Args:
        objective: the loss, without any penalty.
        trajectory: points, displacements and times.
        regularizers: candidates whose strengths are estimated.
        reference: the displacement to compare with, reference(objective, point, time).
        known: penalties that training did apply, with their strengths; their gradients are
            subtracted from the target.
        rows: which parameters' equations to use; by default all.
    """
    candidates = check_candidates(regularizers, known)
    _check_trajectory(objective, trajectory, reference)
    points = _target_points(objective, trajectory, reference)
    return write_equations(Setting("trajectory", objective), points, candidates, rows)


def _check_trajectory(objective: Objective, trajectory: Trajectory, reference: Reference) -> None:
    check_objective(objective)
    if not isinstance(trajectory, Trajectory):
        raise InputError(
            f"trajectory is a {type(trajectory).__name__}: pass tacit.Trajectory(points, "
            "displacements, times), Trajectory.from_positions, or recorder.trajectory()."
        )
    if not callable(reference) or reference is rk4:
        raise InputError(
            f"reference is {reference!r}: pass tacit.equations.euler or tacit.rk4(substeps=10)."
        )


def _target_points(
    objective: Objective, trajectory: Trajectory, reference: Reference
) -> Iterator[TargetPoint]:
    """The target of every step, one at a time."""
    steps = zip(trajectory.points, trajectory.displacements, trajectory.times, strict=True)
    for point, displacement, time in steps:
        params = objective.point(point, what="a trajectory's point")
        expected = reference(objective, params, time)
        check_alike(expected, params, "the reference displacement")
        vector = {n: _rate_beyond(expected[n], displacement[n], time) for n in params}
        eps = torch.finfo(coarsest_dtype(*params.values(), *point.values())).eps
        floors = {n: eps * math.sqrt(square_norm(p)) / time for n, p in params.items()}
        yield TargetPoint(params, [vector], floors, norm(expected) / time)


def _rate_beyond(expected: Tensor, displacement: Tensor, time: float) -> Tensor:
    """(expected − observed displacement)/time, in float64."""
    expected = to_float64(expected)
    return (expected - to_float64(displacement.detach()).to(expected.device)) / time
