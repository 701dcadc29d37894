"""A screen as text: the verdict, and a table of candidates by group."""

import math
import textwrap
from typing import TYPE_CHECKING

from tacit.fitting.summary import WIDTH

if TYPE_CHECKING:
    from tacit.identifiability.screening import Group, Screen, ScreenRow

SEEN = 5e-4
"""A candidate that adds less has no strength to speak of."""
MOST_SHOWN = 4
"""Members of a group that are listed; and groups that are not confirmed."""
UNITS = {"layers": "layers", "endpoints": "endpoints or epochs", "steps": "steps"}


def write_screen(screen: "Screen") -> str:
    """The verdict in a sentence, the candidates by group, and what is not explained."""
    rule = "─" * WIDTH
    width = max(12, *(len(row.name) for row in screen.table)) if screen.table else 12
    kind, count = screen.clusters
    lines = textwrap.wrap(screen.reason, WIDTH)
    lines += [rule, f"tacit: screen of {len(screen.table)} candidates, over {count} {UNITS[kind]}"]
    head = f"{'candidate':<{width}}{'alone':>8}{'added':>8}{'held out':>10}{'p':>9}   strength"
    lines += [rule, head, rule]
    shown = [g for g in screen.groups if g.confirmed] + [
        g for g in screen.groups if not g.confirmed
    ][:MOST_SHOWN]
    rows = {row.name: row for row in screen.table}
    for group in shown:
        lines += _group_lines(group, rows, width)
    if (hidden := len(screen.groups) - len(shown)) > 0:
        lines.append(f"… and {hidden} more groups, none of them confirmed: see screen.table")
    lines.append(rule)
    lines += _notes(screen)
    return "\n".join(lines)


def _group_lines(group: "Group", rows: dict[str, "ScreenRow"], width: int) -> list[str]:
    lines = []
    for place, name in enumerate(group.members[:MOST_SHOWN]):
        row = rows[name]
        p = _p_value(group.p) if place == 0 else ""
        mark = " *" if row.chosen else ""
        lines.append(
            f"{name + mark:<{width + 2}}{row.alone:>6.3f}{row.added:>8.3f}{row.held_out:>10.3f}"
            f"{p:>9}   {_strength(row)}"
        )
    if (more := len(group.members) - MOST_SHOWN) > 0:
        lines.append(f"  … and {more} more that are like these")
    if group.confirmed and not group.named:
        lines.append("  this group is confirmed; which of its members is undecided")
    return [*lines, ""]


def _p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _strength(row: "ScreenRow") -> str:
    if row.added < SEEN:
        return "–"
    if row.interval is None or not all(map(math.isfinite, row.interval)):
        return f"{row.strength:.4g}"
    low, high = row.interval
    return f"{row.strength:.4g} [{low:.3g}, {high:.3g}]"


def _notes(screen: "Screen") -> list[str]:
    """What the columns mean, and what stays unexplained."""
    lines = textwrap.wrap(
        "alone: explained by it alone. added: beside the other chosen ones (*). held out: of "
        f"{UNITS[screen.clusters[0]]} that it was not fitted to. p: of the group, after Holm.",
        WIDTH,
    )
    for name, others in screen.same.items():
        lines += textwrap.wrap(f"{name} is the same here as {', '.join(others)}.", WIDTH)
    if screen.fit is not None:
        for problem in screen.fit.problems:
            lines += textwrap.wrap(f"{problem.kind}: {problem.message}", WIDTH)
    return lines
