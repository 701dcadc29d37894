"""Trajectories: the points of a training run, how far it moved from each, and in what time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from tacit.errors import InputError, check_number, check_type
from tacit.objective.models import BatchNorm
from tacit.objective.params import Params, Point, check_alike, check_finite, to_float64

GROUPS = 8
"""Groups of runs in a mean over runs, or of draws; intervals then have 7 degrees of freedom."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Points θ_t, displacements θ_{t+1} − θ_t, and the flow time that each displacement took.

    The time is η for a step of gradient descent, η·steps for an epoch, η/(1−β) for momentum β
    after burn-in. Trap: Adam's steps follow the gradient flow of L only in a metric. `record` keeps
    it; for a trajectory from elsewhere, pass metric= to `trajectory_equations`.
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
    metrics: Sequence[Params] = ()
    """M of each step, where a recorder saw one: a step moves by −time·M⁻¹∇L. Entries are tensors
    of a parameter's shape (√v̂ + ε of Adam) or single numbers (rates of groups)."""
    scales: Sequence[Params] = ()
    """√v̂ + ε of Adam at each step, where a recorder saw it."""
    groups: Sequence[Sequence[Params]] = ()
    """For each step of a mean over runs: the displacements of independent groups of them."""

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
            check_like(point, self.points[0], what=f"point {step}")
            check_like(displacement, self.points[0], what=f"displacement {step}")

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
            check_like(position, positions[0], what=f"position {number}")
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

    @classmethod
    def mean(cls, trajectories: Sequence["Trajectory"], *, sampled: bool = True) -> "Trajectory":
        """The mean over runs: orders of batches, clients, chains.

        Points and displacements are averaged, step by step. Times must agree.

        Trap: ∇L at the mean point is the mean of ∇L only for runs that are close to each other, as
        they are when they begin every step at the same point.

        Args:
            trajectories: the runs, of equally many steps.
            sampled: whether they are a random sample, so that their disagreement is noise, from
                which a fit has error bars. Pass False for all that there are: all clients, or all
                orders of the batches.
        """
        check_type("trajectories", trajectories, Iterable, "a list of runs")
        runs = list(trajectories)
        for number, run in enumerate(runs):
            check_type(f"run {number} of Trajectory.mean", run, Trajectory, "a tacit.Trajectory")
        check_type("sampled", sampled, bool, "True or False")
        if not runs or any(list(run.times) != list(runs[0].times) for run in runs):
            raise InputError(
                f"{len(runs)} runs of different steps or times cannot be averaged: pass one or "
                "more, of the same times step by step."
            )
        for number, run in enumerate(runs):
            check_alike(run.points[0], runs[0].points[0], what=f"run {number}")
        if len({(run.batch_norm, bool(run.scales)) for run in runs}) > 1:
            raise InputError(
                "the runs differ in whether Adam moved them, or in the statistics of batch norm, "
                "so that their mean follows no one flow: pass runs of the same training."
            )
        steps = range(len(runs[0]))
        parts = [[run.displacements[t] for run in runs] for t in steps]
        groups = min(GROUPS, len(runs)) if sampled else 1
        return cls(
            [_mean_params([run.points[t] for run in runs]) for t in steps],
            [_mean_params(part) for part in parts],
            list(runs[0].times),
            young_momentum=[
                max(run.young_momentum[t] if run.young_momentum else 0.0 for run in runs)
                for t in steps
            ],
            batch_norm=runs[0].batch_norm,
            clipped=max(run.clipped for run in runs),
            carried=_mean_steps([run.carried for run in runs], absent=0.0),
            momentum=max(run.momentum for run in runs),
            updates=max(run.updates for run in runs),
            metrics=_mean_steps([run.metrics for run in runs], absent=1.0, harmonic=True),
            scales=_mean_steps([run.scales for run in runs], harmonic=True),
            groups=[_group_means(part, groups) for part in parts] if groups > 1 else (),
        )

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
        halves = [_halve(step) for step in self.displacements]
        groups = [[_halve(group) for group in step] for step in self.groups]
        times = [time / 2 for time in self.times]
        return replace(self, displacements=halves, times=times, groups=groups)


def _halve(displacement: Params) -> Params:
    return {n: moved / 2 for n, moved in displacement.items()}


def _mean_params(runs: Sequence[Params]) -> Params:
    """The mean of named tensors, in float64; with the mean of their buffers, if they have any."""
    mean = {n: torch.stack([to_float64(run[n].detach()) for run in runs]).mean(0) for n in runs[0]}
    if not isinstance(first := runs[0], Point):
        return mean
    buffers = [run.buffers for run in runs if isinstance(run, Point)]
    floats = {n for n, b in first.buffers.items() if b.is_floating_point()}
    means = {n: torch.stack([b[n] for b in buffers]).mean(0) for n in floats}
    return Point(mean, {**first.buffers, **means})


def _mean_steps(
    runs: Sequence[Sequence[Params]], *, absent: float | None = None, harmonic: bool = False
) -> Sequence[Params]:
    """The means over runs of what each step has by parameter; empty if no run has any.

    What a run has not counts as `absent`; without that, such parameters have no mean. A mean step
    −time·mean(M⁻¹)∇L is in the harmonic mean of metrics.
    """
    count = max(map(len, runs))
    steps = [[run[t] if run else {} for run in runs] for t in range(count)]
    return [_mean_where_present(step, absent, harmonic=harmonic) for step in steps]


def _mean_where_present(runs: Sequence[Params], absent: float | None, *, harmonic: bool) -> Params:
    """The mean of one step of `_mean_steps`."""
    means: Params = {}
    for name in dict.fromkeys(n for run in runs for n in run):
        present = [to_float64(run[name]) for run in runs if name in run]
        if absent is None and len(present) < len(runs):
            continue
        rest = (absent or 0.0) * (len(runs) - len(present))
        total = sum(1 / p if harmonic else p for p in present) + rest
        means[name] = torch.as_tensor(len(runs) / total if harmonic else total / len(runs))
    return means


def _group_means(runs: Sequence[Params], groups: int) -> list[Params]:
    """The means of groups of runs, shifted so that their mean is that of all runs."""
    parts = [_mean_params(runs[group::groups]) for group in range(groups)]
    shift, whole = _mean_params(parts), _mean_params(runs)
    return [{n: part[n] + whole[n] - shift[n] for n in part} for part in parts]


def check_time(time: float) -> None:
    """Refuse a flow time that is not a finite number above zero."""
    check_number("the time of a step (η, or η/(1−β) with momentum β)", time, above=0)


def check_like(vector: Params, reference: Params, *, what: str) -> None:
    """Refuse other names or shapes than the reference's, and values that are not finite."""
    check_alike(vector, reference, what=what)
    check_finite(vector, what=what)


def check_trajectory(trajectory: Any) -> None:
    """Refuse anything but a trajectory."""
    makers = "tacit.Trajectory(points, displacements, times) or recorder.trajectory()"
    check_type("trajectory", trajectory, Trajectory, makers)
