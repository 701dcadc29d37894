"""Strengths that change along training: rows of a watch that differ by more than error bars."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tacit.errors import Problem, ProblemKind
from tacit.fitting.drift import DRIFT

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit
    from tacit.watching.rows import WatchRow

CHANGED = 0.01
"""Probability, if all strengths were constant, that one of them is called a change."""
NORMAL = 1.96
"""Half of a normal distribution's 95 % interval, in standard errors."""


def find_changes(rows: Sequence["WatchRow"]) -> Iterator[Problem]:
    """The strengths that changed along training by more than their error bars.

    Each is tested for being constant: Σ (λ − λ̄)²/error² over the rows is then χ².
    """
    from scipy.stats import chi2

    names = tuple(rows[-1].fit.strengths)
    for name in names:
        known = [(row, row.fit.strengths[name], _error(row.fit, name)) for row in rows]
        known = [(row, value, error) for row, value, error in known if 0 < error < math.inf]
        if len(known) < 2:
            continue
        weights = [error**-2 for _, _, error in known]
        mean = sum(w * v for w, (_, v, _) in zip(weights, known, strict=True)) / sum(weights)
        apart = sum(w * (v - mean) ** 2 for w, (_, v, _) in zip(weights, known, strict=True))
        by_chance = float(chi2.sf(apart, len(known) - 1)) * len(names)
        last, strength, _ = known[-1]
        row, value, _ = max(known, key=lambda item: abs(item[1] - strength))
        if by_chance < CHANGED and abs(strength - value) > DRIFT * abs(mean):
            yield Problem(
                ProblemKind.DRIFTING,
                f"The strength of {name} is {value:.3g} at window {row.window} and {strength:.3g} "
                f"at window {last.window}, further apart than their error bars allow.",
                "If what acts was the same throughout, trust the rows at small learning rates: "
                "equations of an epoch take its steps to be small. Else report how it changes.",
                (name,),
            )


def interval_of(fit: "Fit", name: str) -> tuple[float, float] | None:
    """The 95 % interval of a strength, if windows disagree on it."""
    intervals = fit.intervals()
    kinds = [kind for kind in ("sampling", "training") if kind in intervals]
    return intervals[kinds[0]][name] if kinds else None


def _error(fit: "Fit", name: str) -> float:
    """The standard error of a normal distribution with the same interval; NaN without one."""
    low, high = interval_of(fit, name) or (math.nan, math.nan)
    return (high - low) / 2 / NORMAL
