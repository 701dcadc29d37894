"""The trust figure, drawn from rows."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.coverage.checks import wilson_interval
from tacit_paper.trust.checks import FALSE_ALARMS, POWER, trust_table


def plot(rows: Table) -> "plots.Figure":
    """Two panels of rates: false alarms of well-specified problems, power for the others."""
    table = trust_table(rows)
    well = table[table.listed == ""]
    panels = (
        (well, FALSE_ALARMS, (0, FALSE_ALARMS), plots.BLUE, "well-specified: any Problem"),
        (table[table.listed != ""], POWER, (POWER, 1), plots.RED, "misspecified: the listed kind"),
    )
    with plots.style():
        figure = plots.new_figure(8.6, 5.6)
        both: Any = figure.subplots(2, 1, sharex=True)
        for axes, (part, bound, allowed, colour, title) in zip(both, panels, strict=True):
            _draw_rates(axes, part, colour)
            axes.axvspan(*allowed, color=plots.GREY, alpha=0.15, lw=0)
            axes.axvline(bound, color="black", ls="--", lw=1)
            axes.set_title(title)
        both[1].set_xlabel("fraction of fits that report it")
    return figure


def _draw_rates(axes: Any, table: Table, colour: str) -> None:
    """One line per problem: its rate with the 95 % interval of the count."""
    labels = []
    for y, row in enumerate(table.itertuples()):
        low, high = wilson_interval(row.reported, row.replicates)
        axes.plot([low, high], [y, y], color=colour, lw=1.4)
        axes.plot(row.reported, y, "o", color=colour, ms=4.5, zorder=3)
        labels.append(f"{row.problem} ({row.listed})" if row.listed else row.problem)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set(xlim=(-0.02, 1.02), ylim=(len(labels) - 0.4, -0.6))
    ticks = [0, 0.05, 0.25, 0.5, 0.75, 0.9, 1]
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
