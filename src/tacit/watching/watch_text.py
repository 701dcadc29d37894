"""What a watch says: a table of its rows, the last row's problems, and rows for a frame."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tacit.display import Column, Note, Summary, Table
from tacit.display.numbers import count_of, show_with_interval
from tacit.errors import Problem
from tacit.fitting.fit_rows import strength_rows
from tacit.fitting.summary import lead, merge_similar
from tacit.objective.params import shorten
from tacit.watching.changes import interval_of

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit
    from tacit.watching.rows import WatchRow

MOST_STRENGTHS, ROOM = 3, 61
"""Columns of strengths, and the characters of text that they have together at least."""


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
    shown = {name: [_strength(row.fit, name) for row in rows] for name in names[:MOST_STRENGTHS]}
    columns = (
        Column("window", 6),
        Column("update", 9),
        Column("explained", 11),
        *(Column(name, _width([name, *column], len(shown))) for name, column in shown.items()),
    )
    cells = tuple(
        (str(row.window), str(row.update), f"{row.fit.explained:.1%}", *strengths)
        for row, *strengths in zip(rows, *shown.values(), strict=True)
    )
    others = names[len(shown) :]
    notes = [f"{count_of(len(others), 'more strengths')}: {shorten(others)}"] if others else []
    first, *further = lead(last)
    return Summary(
        title=f"tacit: strengths along training, {count_of(len(rows), 'rows')}{took}",
        lead=(f"In the last row, {first}", *further),
        tables=(Table(columns, cells, tuple(map(Note, notes))),),
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


def _width(texts: Sequence[str], count: int) -> int:
    """Of one of so many columns, which is wide enough for its label and its cells."""
    return max(ROOM // count, *(len(text) + 1 for text in texts))


def _strength(fit: "Fit", name: str) -> str:
    """A strength with its 95 % interval."""
    interval = interval_of(fit, name)
    if interval is None:
        return f"{fit.strengths[name]:.3g}"
    return show_with_interval(fit.strengths[name], *interval)
