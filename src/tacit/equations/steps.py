"""Equations of a trajectory: what force besides the loss gradient moved the weights?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.equations.candidates import ScaledByTime, check_candidates, check_known
from tacit.equations.equations import Equations
from tacit.equations.flow import (
    Flow,
    Metric,
    MetricOfGradient,
    OnBatches,
    Reference,
    SeenGradients,
    check_metric,
    check_reference,
    euler,
    is_one_step,
)
from tacit.equations.sources import PointFacts
from tacit.equations.target import Setting, Target, TargetPoint, write_equations
from tacit.equations.trajectory import Trajectory, check_like, check_trajectory
from tacit.errors import InputError, check_type
from tacit.objective.models import own_names
from tacit.objective.objective import Objective, check_objective
from tacit.objective.params import (
    Params,
    Scope,
    coarsest_dtype,
    norm,
    same_buffers,
    shorten,
    square_norms,
    to_float64,
)
from tacit.objective.ranks import on_its_ranks
from tacit.regularizers.family import Regularizer

PIECE = 8
"""Steps over which the target of a trajectory counts as the same."""
MOST_ALTERNATIVES = 256
"""About so many steps of a trajectory have equations with other families."""
StepWeights = Sequence[float] | Sequence[Mapping[str, Tensor | float]] | Tensor
"""A weight for every step, or for every step a weight for every parameter."""


@on_its_ranks
def trajectory_target(
    objective: Objective,
    trajectory: Trajectory,
    *,
    reference: Reference = euler,
    known: Mapping[Regularizer, float] | None = None,
    metric: Metric | None = None,
    step_weights: StepWeights | None = None,
) -> Target:
    """M·(reference − observed displacement)/time at every step; one float64 vector per step.

    The arguments are those of `trajectory_equations`, which reads the steps one at a time instead.
    The reference follows L + Σ known, and equations of this target need no known=.
    """
    steps = _Steps(objective, trajectory, reference, metric, step_weights)
    followed = check_known(known)
    points = tuple(steps.points(followed))
    if is_one_step(reference) and not followed:  # the equations subtract known penalties
        return Target(steps.setting(), points)
    return Target(replace(steps.setting(), followed=followed, follow=steps.points), points)


def trajectory_equations(  # noqa: PLR0913 # what was observed, then keyword options
    objective: Objective,
    trajectory: Trajectory,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    reference: Reference = euler,
    known: Mapping[Regularizer, float] | None = None,
    rows: Scope = None,
    metric: Metric | None = None,
    step_weights: StepWeights | None = None,
    scaled_by_time: ScaledByTime = False,
) -> Equations:
    """Equations Σ λ_k ∇R_k(θ_t) = M·(reference − observed displacement)/time at every step.

    The reference is where the unregularised flow would have gone: `euler` for what a step adds
    to −η∇L, `rk4()` for what discrete steps add to gradient flow. Known penalties are part of the
    flow: over several updates a penalty acts at other points than the first.

    Trap: the target is a small difference. In float32 it is lost in rounding at small steps, and
    the fit then carries the Problem "no signal".

    Args:
        objective: the loss, without any penalty.
        trajectory: points, displacements and times.
        regularizers: candidates whose strengths are estimated.
        reference: the displacement to compare with, reference(objective, params, time, step). The
            objective's gradient is M⁻¹∇(L + Σ known).
        known: penalties that training did apply, with their strengths. The reference follows
            L + Σ known, and `gradient_norm(objective)` is then ‖∇(L + Σ known)‖².
        rows: which parameters' equations to use; by default all.
        metric: M of the flow dθ/dt = −M⁻¹∇L: a number or tensor for every parameter, or a function
            of the gradient such as `adam_flow(eps)`. By default that of the trajectory, if a
            recorder saw one, or the identity.
        step_weights: W_t of least squares Σ_t ‖W_t^½(…)‖²: a number for every step, or a dictionary
            by parameter for every step. The best are one over the variance of a step's noise.
        scaled_by_time: True, or the regularizers whose columns are multiplied by each step's time:
            λ is then per unit of time. What finite steps add is η/4·‖∇L‖², so that under a schedule
            of step sizes only ¼ is one number.
    """
    candidates = check_candidates(regularizers, known).scaled_by_time(scaled_by_time)
    steps = _Steps(objective, trajectory, reference, metric, step_weights)
    # One explicit step is linear in the gradient: the penalties' part is subtracted from it.
    followed = None if is_one_step(reference) else candidates.known
    setting = replace(steps.setting(), followed=followed)
    candidates.place_knots(trajectory.points, read=objective.point)
    return write_equations(setting, steps.points(followed or {}), candidates, rows)


@on_its_ranks
def accumulated_target(objective: Objective, trajectory: Trajectory) -> Target:
    """−∫∇L dt over a whole trajectory, which equals ∇R(θ_end) − ∇R(θ_start) if R is its potential.

    A flow that is gradient flow in other coordinates (θ = u² − v²) is in those of θ a mirror flow,
    d∇R(θ)/dt = −∇L. The integral is the sum over steps of time·(∇L(θ_t) + ∇L(θ_{t+1}))/2. The
    columns of its equations are the differences of ∇R between the last point and the first.

    Trap: one point gives one potential. That it explains the whole path is seen from targets of
    its parts, stacked.
    """
    check_objective(objective)
    check_trajectory(trajectory)
    if trajectory.metrics:
        raise InputError(
            "the steps were recorded in a metric (Adam, or groups with their own rates), and the "
            "integral of ∇L is over one time: train with one rate of SGD."
        )
    points = [*trajectory.points, _moved(trajectory.points[-1], trajectory.displacements[-1])]
    for number, displacement in enumerate(trajectory.displacements[:-1]):
        _check_gap(points[number], displacement, points[number + 1], number)
    times = [0.0, *trajectory.times, 0.0]
    young = trajectory.young_momentum or (0.0,) * len(trajectory)
    total, unsettled, seen = {}, {}, SeenGradients({})
    for number, params in enumerate(points):
        point = objective.point(params, what="a trajectory's point")
        result = objective.differentiate(point)
        seen.add(result.derivative.keys() - set(result.unreached), {})
        weight = (times[number] + times[number + 1]) / 2
        for name, gradient in result.derivative.items():
            total[name] = total.get(name, 0.0) - weight * gradient
            if number < len(young) and young[number]:
                missing = young[number] * trajectory.times[number]
                unsettled[name] = unsettled.get(name, 0.0) + missing * gradient
    start, end = (objective.point(params) for params in (points[0], points[-1]))
    seconds = sum(trajectory.times)
    floors = {n: seconds * floor for n, floor in objective.rounding(end).items()}
    facts = PointFacts(
        unreached=seen.unreached(end), clipped=trajectory.clipped, burn_in=norm(unsettled)
    )
    point = TargetPoint(end, [total], floors, norm(total) / seconds, facts=facts, start=start)
    return Target(Setting("accumulated", objective), (point,))


def _moved(params: Params, displacement: Params) -> Params:
    moved = {n: (to_float64(p) + displacement[n].to(p.device)).to(p) for n, p in params.items()}
    return same_buffers(moved, params)


def _check_gap(start: Params, displacement: Params, end: Params, number: int) -> None:
    """Refuse steps that do not begin where the one before ended."""
    for name, position in _moved(start, displacement).items():
        scale = float(displacement[name].abs().max()) if position.numel() else 0.0
        if not torch.allclose(position, end[name].to(position), rtol=1e-5, atol=1e-3 * scale):
            raise InputError(
                f"step {number + 1} does not begin where step {number} ended ({name!r}): an "
                "integral over the path needs all of its steps, as from_positions has them."
            )


@dataclass(frozen=True, eq=False)
class _Steps:
    """The steps of a trajectory, compared with a reference: the target's points, one at a time."""

    objective: Objective
    trajectory: Trajectory
    reference: Reference
    metric: Metric | None = None
    step_weights: StepWeights | None = None

    def __post_init__(self) -> None:
        check_objective(self.objective)
        check_trajectory(self.trajectory)
        check_reference(self.reference)
        used, norms = self.trajectory.batch_norm, self.objective.batch_norm
        if norms and used not in (None, norms):
            changed = "changed" if used == "batch" else "did not change"
            raise InputError(
                f"batch_norm={norms!r}, but the running statistics {changed} while the steps were "
                f"recorded: training used batch_norm={used!r}; pass that."
            )
        if isinstance(self.reference, OnBatches):
            self._check_batches(self.reference)
        weights = self.step_weights
        if weights is not None:
            needed = "a list with one number, or one dictionary by parameter, for each step"
            check_type("step_weights", weights, Sequence | Tensor, needed)
            count = len(weights) if not isinstance(weights, Tensor) or weights.ndim else 0
            if isinstance(weights, str) or count != len(self.trajectory):
                raise InputError(
                    f"{count} step_weights for {len(self.trajectory)} steps: pass {needed}."
                )

    def _check_batches(self, reference: OnBatches) -> None:
        """Refuse another number of batches than of updates."""
        steps, updates = len(self.trajectory), self.trajectory.updates
        if len(reference.objectives) != steps or updates > 1:
            raise InputError(
                f"on_batches was given {len(reference.objectives)} objectives for {steps} steps "
                f"of up to {updates} update(s): record every update by itself, and pass the batch "
                "of each, in order."
            )

    def setting(self) -> Setting:
        """The setting of the target; see `Setting`."""
        path = self.trajectory
        # Steps whose momentum is taken out show the whole noise of a batch; those compared with
        # steps on the same batches, that of the technique alone.
        coupled = isinstance(self.reference, OnBatches)
        own_noise = coupled or (is_one_step(self.reference) and path.carried)
        return Setting(
            "trajectory",
            self.objective,
            groups=len(path.groups[0]) if path.groups else 1,
            piece=PIECE if own_noise and not path.groups else 0,
            every=1 + len(path) // MOST_ALTERNATIVES,
        )

    def points(self, known: Mapping[Regularizer, float]) -> Iterator[TargetPoint]:
        """The target of every step; the reference follows L and the known penalties."""
        one_step = is_one_step(self.reference)
        for number, step in enumerate(_read_steps(self.trajectory, without_momentum=one_step)):
            params = self.objective.point(step.point, what="a trajectory's point")
            observed = [own_names(self.objective.model, moved) for moved in step.displacements]
            metric = self._metric_at(step, params)
            flow = Flow(self.objective, known, metric)
            expected = self.reference(flow, params, step.time, number)
            if (known or metric) and not flow.seen.any:
                raise InputError(
                    "the reference did not ask for objective.gradient(…), which has the known "
                    "penalties and the metric: follow that gradient, or leave them out."
                )
            check_like(expected, params, what="the reference displacement")
            yield self._target_point(number, step, params, expected, observed, flow.seen)

    def _target_point(
        self,
        number: int,
        step: "_Step",
        params: Params,
        expected: Params,
        observed: Sequence[Params],
        seen: SeenGradients,
    ) -> TargetPoint:
        time, one_step, metric = step.time, is_one_step(self.reference), seen.metric
        vectors = [
            in_metric({n: _rate_beyond(expected[n], moved[n], time) for n in params}, metric)
            for moved in observed
        ]
        floats = [t for t in step.point.values() if t.is_floating_point()]
        eps = torch.finfo(coarsest_dtype(*params.values(), *floats)).eps
        weights = _check_weights(self.step_weights, number, params)
        rounding = in_metric(in_metric(params, metric), weights)
        squares = square_norms(rounding)
        floors = {n: eps * math.sqrt(square) / time for n, square in squares.items()}
        force = in_metric(expected, metric)
        # A young mean of squares changes what is added to Adam's flow; a young buffer, the flow.
        settling = vectors[0] if callable(self.metric) else {n: f / time for n, f in force.items()}
        facts = PointFacts(
            unreached=seen.unreached(params),
            burn_in=step.young_momentum * norm(in_metric(settling, weights)),
            clipped=self.trajectory.clipped,
            step_sizes=() if one_step else (time,),
            memory=step.memory,
        )
        return TargetPoint(
            params,
            vectors,
            floors,
            norm(force) / time,
            facts=facts,
            metric=_own_scale(self.objective, step),
            time=time,
            weights=weights,
        )

    def _metric_at(self, step: "_Step", params: Params) -> Params | MetricOfGradient | None:
        """The metric of the call, or that of the trajectory; None for the identity."""
        own = step.metric and own_names(self.objective.model, step.metric)
        return check_metric(self.metric, params) if self.metric is not None else own or None


def _own_scale(objective: Objective, step: "_Step") -> Params:
    """Adam's scales under the names of the objective's model; they may be of some parameters."""
    own = dict(zip(step.metric, own_names(objective.model, step.metric), strict=False))
    return {own.get(n, n): scale for n, scale in step.scale.items()}


def in_metric(vector: Params, metric: Params) -> Params:
    """M·v by parameter; v itself for an empty metric."""
    return {n: v * metric[n].to(v.device) for n, v in vector.items()} if metric else vector


def _check_weights(weights: StepWeights | None, number: int, params: Params) -> Params:
    """√W of one step, as a number or a tensor for every parameter; empty without weights."""
    if weights is None:
        return {}
    given = weights[number]
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(params, given)
    if unknown := [str(name) for name in by_name if name not in params]:
        raise InputError(
            f"step_weights[{number}] has unknown names {shorten(unknown)}: pass one for each of "
            f"{shorten(params)}."
        )
    roots = {}
    for name, parameter in params.items():
        value = by_name.get(name)
        numeric = isinstance(value, Tensor | Real)
        weight = to_float64(torch.as_tensor(value if numeric else math.nan)).to(parameter.device)
        fits = weight.shape in ((), parameter.shape)
        if not fits or not bool((torch.isfinite(weight) & (weight >= 0)).all()):
            raise InputError(
                f"step_weights[{number}] has no finite weight of at least zero for {name!r}: pass "
                "a number, or a dictionary with a number or a tensor of its shape for every "
                "parameter."
            )
        roots[name] = weight.sqrt()
    return roots


class _Step(NamedTuple):
    """One step of a trajectory."""

    point: Params
    displacements: Sequence[Params]
    """One, or one per group of runs."""
    time: float
    metric: Params
    scale: Params
    young_momentum: float = 0.0
    memory: float = 0.0


def _read_steps(trajectory: Trajectory, *, without_momentum: bool) -> Iterator[_Step]:
    """The steps, either as they moved, or free of what momentum carried over from earlier ones.

    Without it the displacement is that of the step's own gradient, from the first step on: its
    noise does not depend on that of earlier steps, which moved the weights already.
    """
    path, count = trajectory, len(trajectory)
    taken_out = path.carried if without_momentum else ()
    memory = 1 / (1 - path.momentum) if path.momentum and not taken_out else 0.0
    for t in range(count):
        displacements = path.groups[t] if path.groups else [path.displacements[t]]
        if taken_out:
            displacements = [_without(moved, taken_out[t]) for moved in displacements]
        young = path.young_momentum[t] if path.young_momentum and not taken_out else 0.0
        metric = path.metrics[t] if path.metrics else {}
        scale = path.scales[t] if path.scales else {}
        yield _Step(path.points[t], displacements, path.times[t], metric, scale, young, memory)


def _without(displacement: Params, carried: Params) -> Params:
    """A displacement without what momentum carried into it."""
    own = {
        n: to_float64(moved.detach()) - carried[n].to(moved.device)
        for n, moved in displacement.items()
        if n in carried
    }
    return {**displacement, **own}


def _rate_beyond(expected: Tensor, displacement: Tensor, time: float) -> Tensor:
    """(expected − observed displacement)/time, in float64."""
    expected = to_float64(expected)
    return (expected - to_float64(displacement.detach()).to(expected.device)) / time
