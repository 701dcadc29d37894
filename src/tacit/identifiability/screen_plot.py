"""A screen as a figure: what every candidate explains alone, by group."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tacit.display import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tacit.identifiability.screening import Screen, ScreenRow

MOST_ROWS, MOST_MEMBERS = 14, 4
"""Candidates that are drawn, and of each group."""
HEIGHT = 0.19
"""Inches of a candidate."""
LONGEST = 26
"""Letters of a name."""


def draw_screen(screen: "Screen") -> "Figure":
    """Bars of what candidates explain alone, and lines at what they add beside the chosen ones."""
    with figures.style():
        return _draw(screen, _rows(screen))


def _draw(screen: "Screen", rows: list["ScreenRow"]) -> "Figure":
    gaps = sum(a.group != b.group for a, b in pairwise(rows))
    height = 1.35 + HEIGHT * (len(rows) + 0.6 * gaps)
    figure = figures.new_figure(figures.COLUMN, height)
    axes: Any = figure.subplots()
    places, place = [], 0.0
    for number, row in enumerate(rows):
        place += 1.6 if number and row.group != rows[number - 1].group else 1.0
        places.append(place)
    for row, place in zip(rows, places, strict=True):
        color = figures.BLUE if row.chosen else figures.PALE
        axes.barh(place, max(row.alone, 0.0), height=0.72, color=color)
        axes.plot([row.added] * 2, [place - 0.42, place + 0.42], color=figures.DARK, lw=1.4)
    axes.set_yticks(places, [_label(row) for row in rows])
    axes.tick_params(axis="y", length=0)
    ends = (places[-1] + 0.8, places[0] - 0.8) if places else (1, 0)
    axes.set(xlim=(0, 1), ylim=ends, xlabel="part of the target explained")
    if any(row.chosen for row in rows):
        axes.barh(-9, 0, color=figures.BLUE, label="alone, chosen")
    axes.barh(-9, 0, color=figures.PALE, label="alone, others")
    axes.plot([], [], "|", color=figures.DARK, ms=8, mew=1.4, label="added beside the chosen ones")
    figure.legend(loc="outside lower left", ncols=2, columnspacing=1, borderpad=0)
    figures.set_title(figure, [_title(screen)])
    return figure


def _title(screen: "Screen") -> str:
    """The verdict, without its remedy."""
    if screen.fit is None:
        reason = screen.reason.partition(";")[0].partition(":")[0]
        return reason[:1].upper() + reason[1:]
    names = " and ".join(screen.fit.strengths)
    aligned = "" if screen.verdict == "answer" else " (aligned, not the answer)"
    return f"{names}: {screen.fit.explained:.0%} of the target{aligned}"


def _label(row: "ScreenRow") -> str:
    name = figures.write_name(row.name, LONGEST)
    return f"{name} ({figures.write_number(row.strength)})" if row.chosen else name


def _rows(screen: "Screen") -> list["ScreenRow"]:
    """The first members of every group, until there are enough."""
    members: dict[int, list[ScreenRow]] = {}
    for row in screen.table:
        members.setdefault(row.group, []).append(row)
    return [row for group in members.values() for row in group[:MOST_MEMBERS]][:MOST_ROWS]
