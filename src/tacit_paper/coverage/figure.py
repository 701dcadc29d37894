"""The figure of `coverage` and of `training-coverage`, drawn from rows."""

from typing import Any

from tacit.fitting.error_bars import KINDS
from tacit_paper import Table, plots
from tacit_paper.coverage.checks import coverage_table, wilson_interval, with_promised_coverage

COLOURS = {
    "sampling": plots.BLUE,
    "draws": plots.GREEN,
    "training": plots.ORANGE,
    "steps": plots.RED,
    "layers": plots.GREY,
}
SYMBOLS = {"smooth_l1": "smooth L1", "gradient_norm": "‖∇L‖²", "l2": "ridge", "l1": "L1"}


def plot(rows: Table) -> "plots.Figure":
    """One line per problem and strength: the coverage of its intervals, and of naive ones."""
    table = with_promised_coverage(coverage_table(rows))
    table = table.assign(order=table.kind.map(list(KINDS).index))
    table = table.sort_values(["order", "problem", "name"], kind="stable")
    with plots.style():
        figure = plots.new_figure(8.6, 1.5 + 0.23 * len(table))
        axes: Any = figure.subplots()
        axes.axvspan(0.92, 0.97, color=plots.GREY, alpha=0.15, lw=0)
        axes.axvline(0.95, color="black", ls="--", lw=1)
        labels = []
        for y, row in enumerate(table.itertuples()):
            low, high = wilson_interval(row.covered, row.replicates)
            axes.plot([low, high], [y, y], color=COLOURS[row.kind], lw=1.4)
            axes.plot(row.covered, y, "o", color=COLOURS[row.kind], ms=4.5, zorder=3)
            axes.plot(row.naive, y, "x", color=plots.GREY, ms=5)
            labels.append(f"{row.kind}: {row.problem}, {SYMBOLS.get(row.name, row.name)}")
        axes.set_yticks(range(len(table)), labels, fontsize=7)
        axes.set(xlim=(-0.02, 1.02), ylim=(len(table) - 0.4, -0.6))
        axes.set_xticks([0, 0.25, 0.5, 0.75, 0.95], ["0", "25 %", "50 %", "75 %", "95 %"])
        axes.set_xlabel("how often a nominal 95 % interval contained the true value")
        axes.plot([], [], "o-", color="black", ms=4.5, label="intervals of the kind named")
        axes.plot([], [], "x", color=plots.GREY, ms=5, label="ordinary least squares")
        figure.legend(loc="outside upper right", ncols=2)
    return figure
