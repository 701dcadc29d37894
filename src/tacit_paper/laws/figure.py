"""The forest plot of all laws, drawn from rows."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.laws.checks import LARGEST_ERROR, law_table

LIMIT = 0.04
"""Ratios are shown from 1 − this to 1 + this."""
COLOURS = (plots.BLUE, plots.RED, plots.GREEN, plots.ORANGE, plots.GREY, "#6a4c93")
"""One for each section."""


def plot(rows: Table) -> "plots.Figure":
    """One line per term, under the heading of its section: estimate over theory."""
    table = law_table(rows)
    sections = list(table.section.unique())
    height = len(table) + len(sections)
    with plots.style():
        figure = plots.new_figure(8.6, 0.6 + 0.165 * height)
        axes: Any = figure.subplots()
        axes.axvline(1, color="black", lw=0.8, zorder=0)
        axes.axvspan(1 - LARGEST_ERROR, 1 + LARGEST_ERROR, color=plots.GREY, alpha=0.15, lw=0)
        ticks: dict[int, str] = {}
        for section, colour in zip(sections, COLOURS, strict=False):
            y = len(ticks) + sections.index(section)
            axes.text(1 - LIMIT, y, f" {section}", color=colour, size=8, weight="bold", va="center")
            for row in table[table.section == section].itertuples():
                y += 1
                ticks[y] = f"{row.technique}:  {row.term}"
                _draw_term(axes, y, row, colour)
        axes.set_yticks(list(ticks), list(ticks.values()), fontsize=6.5)
        axes.set(xlim=(1 - LIMIT, 1 + LIMIT), ylim=(height - 0.4, -0.8))
        axes.set_xlabel("estimate / theory")
    return figure


def _draw_term(axes: Any, y: int, row: Any, colour: str) -> None:
    """A point, its interval where it is drawn, and the measured order beside it."""
    if row.drawn:
        axes.plot([row.low, row.high], [y, y], color=colour, lw=1.2)
    face = "white" if row.order else colour
    inside = min(max(row.ratio, 1 - LIMIT), 1 + LIMIT)
    marker = "o" if inside == row.ratio else "<" if row.ratio < 1 else ">"  # beyond the figure
    axes.plot(inside, y, marker, color=colour, mfc=face, ms=3.8, zorder=3, clip_on=False)
    text = f"{row.ratio:.4f}" + (f", order {row.slope:.2f}" if row.order else "")
    axes.annotate(
        text, (1.01, y), xycoords=("axes fraction", "data"), fontsize=6, va="center", color=colour
    )
