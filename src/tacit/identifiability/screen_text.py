"""What a screen says: its verdict, a table of candidates by group, and rows for a frame."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tacit.display import Column, Note, Summary, Table
from tacit.display.numbers import count_of, show_with_interval

if TYPE_CHECKING:
    from tacit.identifiability.screening import Group, Screen, ScreenRow

SEEN = 5e-4
"""A candidate that adds less has no strength to speak of."""
MOST_SHOWN = 4
"""Members of a group that are listed; and groups that are not confirmed."""
UNITS = {"layers": "layers", "endpoints": "endpoints or epochs", "steps": "steps"}
COLUMNS = (
    Column("candidate", 14, "left"),
    Column("alone", 8),
    Column("added", 8),
    Column("held out", 10),
    Column("p", 9),
    Column("strength", align="left"),
)


def summarize_screen(screen: "Screen") -> Summary:
    """The verdict in a sentence, the candidates by group, and what is not explained."""
    kind, count = screen.clusters
    shown = [g for g in screen.groups if g.confirmed] + [
        g for g in screen.groups if not g.confirmed
    ][:MOST_SHOWN]
    by_name = {row.name: row for row in screen.table}
    rows = [row for group in shown for row in _group_rows(group, by_name)]
    if (hidden := len(screen.groups) - len(shown)) > 0:
        ending = "s, none of them" if hidden > 1 else ", not"
        rows.append((f"… and {hidden} more group{ending} confirmed: see screen.table",))
    return Summary(
        title=f"tacit: screen of {count_of(len(screen.table), 'candidates')}, over "
        f"{count_of(count, UNITS[kind])}",
        lead=(screen.reason,),
        tables=(Table(COLUMNS, tuple(rows), tuple(_notes(screen))),),
    )


def screen_rows(screen: "Screen") -> list[dict[str, Any]]:
    """One record per candidate, in the order of the table."""
    groups = {name: group for group in screen.groups for name in group.members}
    rows = []
    for candidate in screen.table:
        row, group = asdict(candidate), groups[candidate.name]
        row["low"], row["high"] = row.pop("interval") or (math.nan, math.nan)
        row["confirmed"], row["named"] = group.confirmed, candidate.name in group.named
        rows.append(row)
    return rows


def _group_rows(group: "Group", by_name: dict[str, "ScreenRow"]) -> list[tuple[str, ...]]:
    rows = []
    for place, name in enumerate(group.members[:MOST_SHOWN]):
        row = by_name[name]
        parts = (f"{part:z.3f}" for part in (row.alone, row.added, row.held_out))
        p = _p_value(group.p) if place == 0 else ""
        rows.append((name + (" *" if row.chosen else ""), *parts, p, _strength(row)))
    if (more := len(group.members) - MOST_SHOWN) > 0:
        rows.append((f"  … and {more} more that are like these",))
    if group.confirmed and not group.named:
        rows.append(("  this group is confirmed; which of its members is undecided",))
    return [*rows, ()]


def _p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _strength(row: "ScreenRow") -> str:
    if row.added < SEEN:
        return "–"
    if row.interval is None or not all(map(math.isfinite, row.interval)):
        return f"{row.strength:.4g}"
    return show_with_interval(row.strength, *row.interval)


def _notes(screen: "Screen") -> list[Note]:
    """What the columns mean, and what stays unexplained."""
    notes = [
        "alone: explained by it alone. added: beside the other chosen ones (*). held out: of "
        f"{UNITS[screen.clusters[0]]} that it was not fitted to. p: of the group, after Holm."
    ]
    notes += [f"{name} is the same here as {', '.join(o)}." for name, o in screen.same.items()]
    if screen.fit is not None:
        notes += [f"{problem.kind}: {problem.message}" for problem in screen.fit.problems]
    return [Note(text) for text in notes]
