"""Whether strengths have settled over the checkpoints of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError, Problem
from tacit.fitting.drift import MIN_STEPS, fit_trend
from tacit.fitting.fits import Fit
from tacit.fitting.problems import MATERIAL, drift_problems
from tacit.fitting.solving import System


@dataclass(frozen=True)
class Drift:
    """The trend of each strength over the last checkpoints. All numbers are plain floats."""

    times: tuple[float, ...]
    first: Mapping[str, float]
    """The fitted line of each strength at the first time."""
    last: Mapping[str, float]
    """The fitted line at the last time."""
    change: Mapping[str, float]
    """(last − first) / |mean strength|."""
    t: Mapping[str, float]
    """(last − first) in standard errors that allow for correlated scatter."""
    problems: tuple[Problem, ...]


def drift(fits: Mapping[Any, Fit], *, last: int = 10) -> Drift:
    """Whether strengths still change over the last checkpoints of a run, from `time_varying` fits.

    A line is fitted to each strength over time, by least squares. A "drifting" Problem is reported
    as for a trajectory: for a change of more than 10 %, beyond 4 standard errors, of a strength
    that contributes materially to the fit. The standard error allows for scatter that is
    correlated over neighbouring checkpoints (Newey & West 1987).

    Trap: it measures scatter about a line. A strength that wanders without direction is not
    reported as drifting.
    """
    times = _last_times(fits, last)
    chosen = [fits[time] for time in times]
    names = tuple(chosen[0].strengths)
    if any(tuple(fit.strengths) != names for fit in chosen):
        raise InputError("the fits have different strengths: fit all with the same regularizers.")
    strengths = torch.tensor([list(f.strengths.values()) for f in chosen], dtype=torch.float64)
    clock = torch.tensor([float(time) for time in times], dtype=torch.float64)
    lags = math.floor(4 * (len(times) / 100) ** (2 / 9))
    line = fit_trend(clock, strengths, lags=lags)
    material = torch.stack([_contributions(fit) for fit in chosen]).mean(0) > MATERIAL
    period = f"the last {len(times)} checkpoints"
    problems = tuple(drift_problems(names, line, line.drifting & material, period))

    def by_name(numbers: Tensor) -> dict[str, float]:
        return dict(zip(names, torch.where(numbers.isnan(), 0.0, numbers).tolist(), strict=True))

    return Drift(
        times=tuple(clock.tolist()),
        first=by_name(line.first),
        last=by_name(line.last),
        change=by_name(line.change / line.mean.abs()),
        t=by_name(line.change / line.error),
        problems=problems,
    )


def _last_times(fits: Any, last: Any) -> list[Any]:
    """The times of the last checkpoints, in order; arguments of another kind are refused."""
    if not isinstance(fits, Mapping):
        raise InputError(
            f"fits is a {type(fits).__name__}: pass a dictionary from time to Fit, which "
            "tacit.time_varying returns."
        )
    if isinstance(last, bool) or not isinstance(last, int) or last < MIN_STEPS:
        raise InputError(
            f"last is {last!r}: pass a whole number of checkpoints, at least {MIN_STEPS}."
        )
    if not all(_is_time(time) for time in fits):
        raise InputError("the times of fits are not all finite numbers: pass steps or epochs.")
    if not all(isinstance(fit, Fit) for fit in fits.values()):
        raise InputError(
            "the values of fits are not all fits: pass what tacit.time_varying returns."
        )
    times = sorted(fits)[-last:]
    if len(times) < MIN_STEPS:
        raise InputError(
            f"there are {len(times)} checkpoints, too few to separate a trend from scatter: fit at "
            f"least {MIN_STEPS}."
        )
    return times


def _is_time(time: Any) -> bool:
    return isinstance(time, Real) and not isinstance(time, bool) and math.isfinite(time)


def _contributions(fit: Fit) -> Tensor:
    """‖λ_k φ_k‖ / ‖target‖ of each strength."""
    strengths = torch.tensor(list(fit.strengths.values()), dtype=torch.float64)
    factor = fit.equations.factor()
    target_norm = factor[:, len(strengths) :].mean(1).norm()
    norms = strengths.abs() * System(factor[:, : len(strengths)]).norms
    return norms / target_norm if target_norm else torch.zeros_like(norms)
