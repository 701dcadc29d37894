"""Whether strengths have settled over the checkpoints of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError, Problem, check_number, check_type, check_whole
from tacit.fitting.drift import MIN_STEPS, fit_trend
from tacit.fitting.evidence import NEGLIGIBLE
from tacit.fitting.fits import Fit
from tacit.fitting.problems import drifting, trend_findings
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
    material = torch.stack([_contributions(fit) for fit in chosen]).mean(0) > NEGLIGIBLE
    period = f"the last {len(times)} checkpoints"
    findings = trend_findings(names, line, material, period)
    problems = tuple(drifting.report(concerned, **numbers) for concerned, numbers in findings)

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


def _last_times(fits: Mapping[Any, Fit], last: int) -> list[Any]:
    """The times of the last checkpoints, in order."""
    returned = "what tacit.time_varying returns"
    check_type("fits", fits, Mapping, f"a dictionary from time to Fit, {returned}")
    check_whole("last", last, least=MIN_STEPS)
    for time, fit in fits.items():
        check_number("a time of fits", time)
        check_type(f"the fit at time {time}", fit, Fit, returned)
    times = sorted(fits)[-last:]
    if len(times) < MIN_STEPS:
        raise InputError(
            f"there are {len(times)} checkpoints, too few to separate a trend from scatter: fit at "
            f"least {MIN_STEPS}."
        )
    return times


def _contributions(fit: Fit) -> Tensor:
    """‖λ_k φ_k‖ / ‖target‖ of each strength."""
    strengths = torch.tensor(list(fit.strengths.values()), dtype=torch.float64)
    factor = fit.equations.factor()
    target_norm = factor[:, len(strengths) :].mean(1).norm()
    norms = strengths.abs() * System(factor[:, : len(strengths)]).norms
    return norms / target_norm if target_norm else torch.zeros_like(norms)
