"""The forest plot of all laws, drawn from rows."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.laws.checks import law_table

LIMIT = 0.03
"""Ratios are shown from 1 − this to 1 + this."""
COLOURS = (plots.BLUE, plots.RED, plots.GREEN, plots.ORANGE, plots.GREY)


def plot(rows: Table) -> "plots.Figure":
    """One line per term: estimate over theory, with what theory says on the left."""
    table = law_table(rows)
    with plots.style():
        figure = plots.new_figure(8.6, 0.6 + 0.165 * len(table))
        axes: Any = figure.subplots()
        for y, row in enumerate(table.itertuples()):
            colour = COLOURS[list(table.section.unique()).index(row.section) % len(COLOURS)]
            _draw_term(axes, y, row, colour)
        labels = [f"{row.technique}:  {row.term}" for row in table.itertuples()]
        axes.set_yticks(range(len(labels)), labels, fontsize=6.5)
        axes.axvline(1, color="black", lw=0.8, zorder=0)
        axes.axvspan(0.99, 1.01, color=plots.GREY, alpha=0.15, lw=0)
        axes.set(xlim=(1 - LIMIT, 1 + LIMIT), ylim=(len(table) - 0.4, -0.6))
        axes.set_xlabel("estimate / theory")
    return figure


def _draw_term(axes: Any, y: int, row: Any, colour: str) -> None:
    """A point, its interval where it is drawn, and the measured order beside it."""
    if row.drawn:
        axes.plot([row.low, row.high], [y, y], color=colour, lw=1.2)
    face = "white" if row.order else colour
    axes.plot(row.ratio, y, "o", color=colour, mfc=face, ms=3.8, zorder=3)
    text = f"{row.ratio:.4f}" + (f", order {row.slope:.2f}" if row.order else "")
    axes.annotate(
        text, (1.01, y), xycoords=("axes fraction", "data"), fontsize=6, va="center", color=colour
    )
