"""Whether strengths have settled over the checkpoints of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tacit.errors import InputError, Problem
from tacit.fitting.drift import STEPS, trend
from tacit.fitting.problems import MATERIAL, drift_problems
from tacit.fitting.solving import System

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit


@dataclass(frozen=True)
class Drift:
    """The trend of each strength over the last checkpoints. All numbers are plain floats."""

    times: tuple[float, ...]
    first: Mapping[str, float]
    """Where a straight line through each strength begins."""
    last: Mapping[str, float]
    """Where it ends."""
    change: Mapping[str, float]
    """last − first, as a part of the mean strength."""
    t: Mapping[str, float]
    """last − first in standard errors, with scatter allowed to be correlated over neighbours."""
    problems: tuple[Problem, ...]


def drift(fits: "Mapping[Any, Fit]", *, last: int = 10) -> Drift:
    """Whether strengths still move over the last checkpoints of a run, as `time_varying` fits them.

    A line through each strength over time, by least squares. The standard error allows for
    scatter that is correlated over neighbouring checkpoints (Newey & West 1987); it is one of
    scatter about the line, so a strength that wanders without direction is not called drifting.
    "drifting" is said as of a trajectory: a change of more than 10 %, beyond 4 standard errors, of
    a strength that matters.
    """
    times = _times(fits, last)
    chosen = [fits[time] for time in times]
    names = tuple(chosen[0].strengths)
    if any(tuple(found.strengths) != names for found in chosen):
        raise InputError("the fits differ in their strengths: fit all with the same regularizers.")
    values = torch.tensor([list(f.strengths.values()) for f in chosen], dtype=torch.float64)
    clock = torch.tensor([float(time) for time in times], dtype=torch.float64)
    lags = math.floor(4 * (len(times) / 100) ** (2 / 9))
    found = trend(clock, values, lags=lags)
    matters = torch.stack([_contributions(f) for f in chosen]).mean(0) > MATERIAL
    over = f"the last {len(times)} checkpoints"
    problems = tuple(drift_problems(names, found, found.drifting & matters, over))

    def named(numbers: Tensor) -> dict[str, float]:
        return dict(zip(names, torch.where(numbers.isnan(), 0.0, numbers).tolist(), strict=True))

    return Drift(
        times=tuple(clock.tolist()),
        first=named(found.first),
        last=named(found.last),
        change=named(found.change / found.mean.abs()),
        t=named(found.change / found.error),
        problems=problems,
    )


def _times(fits: Any, last: Any) -> list[Any]:
    if not isinstance(fits, Mapping):
        raise InputError(
            f"fits is a {type(fits).__name__}: pass a dictionary from time to Fit, such as "
            "tacit.time_varying gives."
        )
    if isinstance(last, bool) or not isinstance(last, int) or last < STEPS:
        raise InputError(f"last is {last!r}: pass a whole number of checkpoints, at least {STEPS}.")
    if not all(_is_time(time) for time in fits):
        raise InputError("the times of fits are not all finite numbers: pass steps or epochs.")
    if not all(hasattr(found, "strengths") for found in fits.values()):
        raise InputError("the values of fits are not all fits: pass what time_varying gives.")
    times = sorted(fits)[-last:]
    if len(times) < STEPS:
        raise InputError(
            f"{len(times)} checkpoints cannot tell a trend from scatter: fit at least {STEPS}."
        )
    return times


def _is_time(time: Any) -> bool:
    return isinstance(time, Real) and not isinstance(time, bool) and math.isfinite(time)


def _contributions(found: "Fit") -> Tensor:
    """‖λ_k φ_k‖ / ‖target‖ of one fit."""
    strengths = torch.tensor(list(found.strengths.values()), dtype=torch.float64)
    factor = found.equations.factor()
    target = factor[:, len(strengths) :].mean(1).norm()
    scaled = strengths.abs() * System(factor[:, : len(strengths)]).norms
    return scaled / target if target else torch.zeros_like(scaled)
