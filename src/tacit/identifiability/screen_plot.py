"""A screen as a figure: what every candidate explains alone, by group."""

import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tacit.identifiability.screening import Screen, ScreenRow

MOST_ROWS, MOST_MEMBERS = 14, 4
"""Candidates that are drawn, and of each group."""
CHOSEN, OTHER, ADDED = "#1b6ca8", "#b8c4cf", "#0b2f4a"
HEIGHT = 0.27
"""Inches of a candidate."""


def draw_screen(screen: "Screen") -> "Figure":
    """Bars of what candidates explain alone, and lines at what they add beside the chosen ones."""
    from matplotlib.figure import Figure

    rows = _rows(screen)
    gaps = sum(a.group != b.group for a, b in pairwise(rows))
    figure = Figure(figsize=(6.4, 1.5 + HEIGHT * (len(rows) + 0.6 * gaps)), layout="constrained")
    axes: Any = figure.subplots()
    places, place = [], 0.0
    for number, row in enumerate(rows):
        place += 1.6 if number and row.group != rows[number - 1].group else 1.0
        places.append(place)
    for row, place in zip(rows, places, strict=True):
        color = CHOSEN if row.chosen else OTHER
        axes.barh(place, max(row.alone, 0.0), height=0.72, color=color)
        axes.plot([row.added] * 2, [place - 0.42, place + 0.42], color=ADDED, lw=1.6)
    axes.set_yticks(places, [_label(row) for row in rows])
    axes.set(
        xlim=(0, 1), ylim=(places[-1] + 0.8, places[0] - 0.8), xlabel="part of the target explained"
    )
    axes.barh(-9, 0, color=CHOSEN, label="alone, chosen")
    axes.barh(-9, 0, color=OTHER, label="alone")
    axes.plot([], [], color=ADDED, lw=1.6, label="added beside the chosen ones")
    axes.legend(loc="lower right", frameon=False, fontsize="small")
    axes.set_title("\n".join(textwrap.wrap(_title(screen), 62)), fontsize="medium", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _title(screen: "Screen") -> str:
    """The verdict, without its remedy."""
    if screen.fit is None:
        return screen.reason.partition(";")[0].partition(":")[0]
    names = " and ".join(screen.fit.strengths)
    aligned = "" if screen.verdict == "answer" else " (aligned, not the answer)"
    return f"{names}: {screen.fit.explained:.0%} of the target{aligned}"


def _label(row: "ScreenRow") -> str:
    return f"{row.name}  ({row.strength:.3g})" if row.chosen else row.name


def _rows(screen: "Screen") -> list["ScreenRow"]:
    """The first members of every group, until there are enough."""
    members: dict[int, list[ScreenRow]] = {}
    for row in screen.table:
        members.setdefault(row.group, []).append(row)
    return [row for group in members.values() for row in group[:MOST_MEMBERS]][:MOST_ROWS]
