"""The rows of a watch as a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tacit.errors import Problem
from tacit.fitting.summary import WIDTH, write_problems
from tacit.objective.params import shorten

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit
    from tacit.watching.training_watch import WatchRow

MOST_STRENGTHS = 3
"""Columns of strengths."""


def write_watch(
    rows: Sequence["WatchRow"],
    problems: Sequence[Problem],
    overhead: float | None,
    outlook: str,
) -> str:
    """One line per row, the problems, and the part of the training's time that watching took."""
    took = "" if overhead is None else f"; watching took {overhead:.1%} of the training's time"
    if not rows:
        return f"tacit: strengths along training, no row yet: {outlook}"
    rule, names = "─" * WIDTH, list(rows[-1].fit.strengths)
    shown = names[:MOST_STRENGTHS]
    width = (WIDTH - 27) // len(shown)
    head = f"{'window':>6}{'update':>9}{'explained':>11} " + "".join(
        f"{name[: width - 1]:>{width}}" for name in shown
    )
    lines = [f"tacit: strengths along training, {len(rows)} rows{took}", rule, head, rule]
    for row in rows:
        strengths = "".join(f"{_strength(row.fit, name):>{width}}" for name in shown)
        lines.append(f"{row.window:>6}{row.update:>9}{row.fit.explained:>11.1%} {strengths}")
    lines.append(rule)
    if len(names) > len(shown):
        lines.append(f"{len(names) - len(shown)} more strengths: {shorten(names[len(shown) :])}")
    return "\n".join([*lines, *write_problems(problems)])


def _strength(fit: "Fit", name: str) -> str:
    """A strength with its 95 % interval."""
    kinds = [kind for kind in ("sampling", "training") if kind in fit.standard_errors]
    if not kinds:
        return f"{fit.strengths[name]:.3g}"
    low, high = fit.intervals()[kinds[0]][name]
    return f"{fit.strengths[name]:.3g} [{low:.2g}, {high:.2g}]"
