"""What the finite size of SGD's steps adds to strengths, which their error bars do not contain."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.optim import Optimizer

from tacit.equations.recording import flow_times
from tacit.equations.target import Target
from tacit.errors import Problem, ProblemKind
from tacit.fitting.fits import Fit, fit
from tacit.objective.objective import Objective
from tacit.objective.params import Params, same_buffers
from tacit.objective.samples import Units, sample
from tacit.regularizers.family import Regularizer

PAIRS, GROUPS = 16, 4
"""Pairs of batches whose own steps are looked at, at most, and groups of them, which show how
uncertain the answer is."""
CLEAR = 1.0
"""How many of its standard errors a step error must exceed to count."""
PART, SMALL = 0.5, 0.02
"""A step error is a Problem above these parts of half an interval, and of the strength."""


def step_errors(
    target: Target,
    regularizers: Sequence[Regularizer],
    objective: Objective,
    units: Units,
    optimizer: Optimizer,
    *,
    batch: float,
    updates: int,
) -> dict[str, float]:
    """How far finite steps move the strengths of an epoch, where it is clear: to first order.

    A batch b meets weights that do not contain its own step −τ(g_b − ∇L) yet, in an epoch whose
    mean weights contain half of it. The mean of the gradients of an epoch is therefore that of g_b
    at θ̄ + ½τ(g_b − ∇L), not at θ̄. It adds (τ/4)·variance of g_b to the loss (Smith et al. 2021;
    see `gradient_variance`), of which candidates take up a part. Some batches show its size.
    Nothing is returned for windows with samples, whose noise is larger by far, for data that are
    not indexed, and for several processes.

    Args:
        target: of the epoch, which is the last of the target's points.
        regularizers: those whose strengths are estimated.
        objective: the loss.
        units: what its data can be divided into.
        optimizer: the one that trained the model, without wrappers.
        batch: about how many units an update was from.
        updates: how many updates the epoch had.
    """
    whole = units.per_batch if objective.batch_norm == "batch" else 1
    size = whole * max(1, round(batch / whole))
    seen = units.indexed and objective.ranks.count == 1 and not target.setting.sampled
    if size >= units.count or not seen:
        return {}
    point = target.points[-1]
    order = torch.Generator().manual_seed(objective.seed)
    batches = torch.randperm(units.count, generator=order)[: units.count // size * size].split(size)
    pairs = [*zip(batches[::2], batches[1::2], strict=False)][:PAIRS]
    if len(pairs) < GROUPS:
        return {}
    half_steps = _half_steps(target, objective, optimizer, updates)
    changes = [{n: torch.zeros_like(v) for n, v in point.vectors[0].items()} for _ in range(GROUPS)]
    for number, pair in enumerate(pairs):
        parts = [sample(objective, units, numbers) for numbers in pair]
        _add_change(changes[number % GROUPS], parts, point.params, half_steps)
    scale = (units.count - size) / units.count
    vectors = [
        {n: scale * change / len(pairs[group::GROUPS]) for n, change in by_name.items()}
        for group, by_name in enumerate(changes)
    ]
    setting = replace(target.setting, groups=GROUPS)
    alone = fit(Target(setting, (replace(point, vectors=vectors),)).equations(regularizers))
    noise = alone.standard_errors.get("draws", {})
    return {
        n: error
        for n, error in alone.strengths.items()
        if abs(error) > CLEAR * noise.get(n, math.inf)
    }


def _add_change(
    change: Params,
    parts: Sequence[Objective],
    params: Params,
    half_steps: Mapping[str, torch.Tensor | float],
) -> None:
    """Add what the own steps of two batches change in the mean of their gradients.

    Each is displaced by ½τ(g_b − g_c). Half of both changes, in the mean over independent pairs, is
    what displacements by ½τ(g_b − ∇L) change.
    """
    gradients = [part.differentiate(part.point(params)).derivative for part in parts]
    for part, gradient, other in zip(parts, gradients, reversed(gradients), strict=True):
        moved = {
            n: (theta + half_steps[n] * (gradient[n] - other[n])).to(theta)
            for n, theta in params.items()
        }
        displaced = part.differentiate(part.point(same_buffers(moved, params))).derivative
        for name, total in change.items():
            total += 0.5 * (displaced[name] - gradient[name]).to(total)


def _half_steps(
    target: Target, objective: Objective, optimizer: Optimizer, updates: int
) -> dict[str, torch.Tensor | float]:
    """Half of the flow time of one update, by parameter, divided by Adam's scale."""
    point = target.points[-1]
    times = flow_times(objective.model, optimizer, point.params)
    # The rates of now give the proportions of groups; a schedule may have ended at zero.
    largest = max(times.values())
    parts = {name: time / largest if largest else 1.0 for name, time in times.items()}
    half = 0.5 * point.time / updates
    return {name: half * part / point.metric.get(name, 1.0) for name, part in parts.items()}


def with_step_problem(settled: Fit, errors: Mapping[str, float]) -> Fit:
    """The fit with a Problem for the strengths that finite steps move out of their intervals."""
    intervals = settled.intervals().get("training", {})
    large = {
        name: error
        for name, error in errors.items()
        if abs(error) > SMALL * abs(settled.strengths[name])
        and abs(error) > PART * _half_width(intervals.get(name))
    }
    if not large:
        return settled
    moved = ", ".join(f"{name} by about {error:.2g}" for name, error in large.items())
    problem = Problem(
        ProblemKind.UNSETTLED,
        f"The steps are large: they move the strength of {moved}, which the error bars "
        "do not contain.",
        "Trust rows at smaller learning rates, or train a copy on slowly (tacit.settle). SGD's "
        "steps of size τ add τ/4 · tacit.regularizers.gradient_variance to the loss.",
        tuple(large),
    )
    gravity = [str(kind) for kind in ProblemKind]
    problems = sorted((*settled.problems, problem), key=lambda p: gravity.index(p.kind))
    return replace(settled, problems=tuple(problems))


def _half_width(interval: tuple[float, float] | None) -> float:
    return 0.0 if interval is None else (interval[1] - interval[0]) / 2
