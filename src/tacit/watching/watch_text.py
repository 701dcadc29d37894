"""What a watch says: a table of its rows, the last row's problems, and rows for a frame."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tacit.display import Column, Note, Summary, Table
from tacit.display.numbers import show_with_interval
from tacit.errors import Problem
from tacit.fitting.fit_rows import strength_rows
from tacit.fitting.summary import lead, merge_similar
from tacit.objective.params import shorten
from tacit.watching.changes import interval_of

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit
    from tacit.watching.rows import WatchRow

MOST_STRENGTHS = 3
"""Columns of strengths."""


def summarize_watch(
    rows: Sequence["WatchRow"],
    problems: Sequence[Problem],
    overhead: float | None,
    outlook: str,
) -> Summary:
    """One line per row, the problems, and the part of the training's time that watching took."""
    if not rows:
        return Summary(f"tacit: strengths along training, no row yet: {outlook}")
    took = "" if overhead is None else f"; watching took {overhead:.1%} of the training's time"
    last, names = rows[-1].fit, list(rows[-1].fit.strengths)
    shown = names[:MOST_STRENGTHS]
    columns = (
        Column("window", 6),
        Column("update", 9),
        Column("explained", 11),
        *(Column(name, 61 // len(shown)) for name in shown),
    )
    cells = tuple(
        (
            str(row.window),
            str(row.update),
            f"{row.fit.explained:.1%}",
            *(_strength(row.fit, name) for name in shown),
        )
        for row in rows
    )
    others = [f"{len(names) - len(shown)} more strengths: {shorten(names[len(shown) :])}"]
    first, *further = lead(last)
    return Summary(
        title=f"tacit: strengths along training, {len(rows)} rows{took}",
        lead=(f"In the last row, {first}", *further),
        tables=(Table(columns, cells, tuple(map(Note, others if names[len(shown) :] else []))),),
        problems=merge_similar(problems),
    )


def watch_rows(rows: Sequence["WatchRow"]) -> list[dict[str, Any]]:
    """One record per row and strength."""
    return [
        {
            "window": row.window,
            "update": row.update,
            "examples": row.examples,
            "explained": row.fit.explained,
            **strength,
        }
        for row in rows
        for strength in strength_rows(row.fit)
    ]


def _strength(fit: "Fit", name: str) -> str:
    """A strength with its 95 % interval."""
    interval = interval_of(fit, name)
    if interval is None:
        return f"{fit.strengths[name]:.3g}"
    return show_with_interval(fit.strengths[name], *interval)
