"""A watch as a figure: strengths with their intervals along training, and what they explain."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tacit.display import figures
from tacit.fitting.shares import column_groups
from tacit.fitting.summary import title_lines
from tacit.watching.changes import interval_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tacit.watching.rows import WatchRow

HEIGHT = 0.95
"""Inches of a panel."""
LONGEST = 30
"""Letters of a name."""


def draw_watch(rows: Sequence["WatchRow"]) -> "Figure":
    """A panel per regularizer, whose strengths have one unit, above the explained fraction."""
    with figures.style():
        return _draw(rows)


def _draw(rows: Sequence["WatchRow"]) -> "Figure":
    last = rows[-1].fit
    groups = {
        label: [last.equations.names[c] for c in columns]
        for label, columns in column_groups(last.equations).items()
    }
    first, *problems = title_lines(last)
    title = [f"In the last row, {first}", *problems]
    height = HEIGHT * (len(groups) + 0.7) + 0.17 * len(title) + 0.4
    figure = figures.new_figure(figures.COLUMN, height)
    heights = [*[1.0] * len(groups), 0.7]
    panels: Any = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    labels = figures.write_names(groups, LONGEST)
    for axes, label, names in zip(panels, labels, groups.values(), strict=False):
        _draw_strengths(axes, label, names, rows)
    updates = [row.update for row in rows]
    panels[-1].plot(
        updates, [row.fit.explained for row in rows], "o-", color=figures.GREY, clip_on=False
    )
    panels[-1].set(ylim=(0, 1), xlabel="updates", yticks=[0, 1], yticklabels=["0", "100%"])
    panels[-1].set_title("explained", fontsize=figures.SMALL)
    figures.write_ticks(panels[-1].xaxis)
    figures.set_title(figure, title)
    return figure


def _draw_strengths(
    axes: Any, label: str, names: Sequence[str], rows: Sequence["WatchRow"]
) -> None:
    """The strengths of one regularizer along the updates, with their intervals as bands."""
    updates = [row.update for row in rows]
    shown, lines = names[: len(figures.SERIES)], []
    for name, (color, dashes) in zip(shown, figures.SERIES, strict=False):
        strengths = [row.fit.strengths[name] for row in rows]
        axes.plot(updates, strengths, "o", color=color)
        (line,) = axes.plot(updates, strengths, color=color, linestyle=dashes)
        lines.append(line)
        intervals = [interval_of(row.fit, name) or (math.nan, math.nan) for row in rows]
        low, high = (
            [v if math.isfinite(v) else math.nan for v in ends]
            for ends in zip(*intervals, strict=True)
        )
        axes.fill_between(updates, low, high, color=color, alpha=0.2, linewidth=0)
        if len(rows) == 1:
            axes.vlines(updates, low, high, color=color)
    axes.axhline(0, color="black", linewidth=0.6)
    title = f"strength of {label}"
    if len(names) > len(shown):
        title += f" (first {len(shown)} of {len(names)})"
    axes.set_title(title, fontsize=figures.SMALL)
    if len(shown) > 1:
        labels = figures.write_names(shown, LONGEST // 2)
        axes.legend(lines, labels, ncols=2, columnspacing=1, handlelength=1.8)
    figures.write_ticks(axes.yaxis, most=3)
