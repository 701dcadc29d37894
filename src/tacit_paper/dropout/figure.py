"""The dropout figure at a glance: three questions, drawn from the rows."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.dropout.selecting import (
    architectures,
    has_columns,
    means_and_intervals,
    medians_by_rate,
    select,
)

COLOURS = (plots.BLUE, plots.GREEN, plots.ORANGE, plots.RED)
"""Of the widths, from narrow to wide."""
FAMILIES = {
    "l2": (plots.GREY, "s", "ridge"),
    "explicit_dropout": (plots.BLUE, "o", "second order"),
}
LINES = ("-", "--", ":")


def plot(rows: Table) -> "plots.Figure":
    """(A) The published and the exact strength; (B) what ridge explains; (C) what dropout adds."""
    shapes = architectures(rows)
    with plots.style():
        figure = plots.new_figure(11.5, 4.4)
        parts: Any = figure.subfigures(1, 3, width_ratios=[1.3, 1, 1])
        _plot_strengths(parts[0], rows, shapes)
        _plot_ridge(parts[1], rows, shapes)
        _plot_explained(parts[2], rows, _shown(shapes))
    return figure


def _plot_strengths(figure: Any, rows: Table, shapes: list[tuple[int, int]]) -> None:
    """Medians over seeds of both strengths: one panel per depth, one colour per width."""
    depths = sorted({depth for depth, _ in shapes})
    widths = sorted({width for _, width in shapes})
    axes: Any = figure.subplots(1, len(depths), sharey=True, squeeze=False)[0]
    for depth, ax in zip(depths, axes, strict=True):
        gaps = []
        for width in (w for d, w in shapes if d == depth):
            medians, colour = medians_by_rate(rows, (depth, width)), COLOURS[widths.index(width)]
            style = {"color": colour, "ms": 4}
            ax.plot(medians.index, medians.published_l2, "o--", mfc="white", lw=1.1, **style)
            ax.plot(medians.index, medians.total_l2, "o-", label=f"width {width}", **style)
            gaps += (medians.published_l2 / medians.total_l2).tolist()
        ax.set(title=f"{depth} hidden layers", xlabel="dropout rate q", yscale="log")
        gap = f"exact (solid):\n{min(gaps):.3g} to {max(gaps):.3g} times smaller"
        ax.text(0.04, 0.98, "published fit (dashed)", transform=ax.transAxes, fontsize=8, va="top")
        ax.text(0.04, 0.02, gap, transform=ax.transAxes, fontsize=8)
    axes[0].margins(y=0.18)
    axes[0].set_ylabel("strength λ̂ of ridge")
    figure.suptitle("A  ridge strength: published and exact", x=0.02, ha="left", fontsize=10)
    legend_below(figure, axes[0], 3)


def _plot_ridge(figure: Any, rows: Table, shapes: list[tuple[int, int]]) -> None:
    """The fraction of −∇L at the last weights that the exact ridge explains, medians over seeds."""
    from matplotlib.ticker import PercentFormatter

    ax: Any = figure.subplots()
    depths, widths = (sorted(set(sizes)) for sizes in zip(*shapes, strict=True))
    for depth, width in shapes:
        medians = medians_by_rate(rows, (depth, width)).total_explained
        style = {"color": COLOURS[widths.index(width)], "ls": LINES[depths.index(depth)], "ms": 4}
        ax.plot(medians.index, medians, marker="o", label=f"{depth}×{width}", **style)
    ax.set(xlabel="dropout rate q", ylabel="explained fraction", yscale="log")
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    figure.suptitle("B  what ridge explains of −∇L", x=0.02, ha="left", fontsize=10)
    legend_below(figure, ax, 3)


def legend_below(figure: Any, ax: Any, columns: int) -> None:
    """A legend below the panel, where it covers nothing."""
    handles, labels = ax.get_legend_handles_labels()
    style = {"columnspacing": 1.0, "handlelength": 1.4, "handletextpad": 0.4}
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, **style)


def _shown(shapes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """One architecture of middle width per depth."""
    depths = sorted({depth for depth, _ in shapes})
    widths = {depth: [w for d, w in shapes if d == depth] for depth in depths}
    return [(depth, widths[depth][(len(widths[depth]) - 1) // 2]) for depth in depths]


def _plot_explained(figure: Any, rows: Table, shapes: list[tuple[int, int]]) -> None:
    """The fraction of dropout's own effect that each family explains, at the best weights."""
    ax: Any = figure.subplots()
    effects = select(rows, kind="effect", weights="best")
    for (depth, width), line in zip(shapes, LINES, strict=False):
        networks = select(effects, depth=depth, width=width)
        for name, (colour, marker, label) in FAMILIES.items():
            if not has_columns(networks, f"{name}_explained"):
                continue
            rates, means, errors = means_and_intervals(networks, f"{name}_explained")
            ax.errorbar(
                rates, means, errors, fmt=marker + line, color=colour, ms=4.5, lw=1.3,
                elinewidth=0.9, label=label if line == LINES[0] else None,
            )  # fmt: skip
    styles = zip(shapes, ("solid", "dashed", "dotted"), strict=False)
    ax.set_title(", ".join(f"{depth}×{width} {style}" for (depth, width), style in styles))
    ax.set(xlabel="dropout rate q", ylabel="explained fraction", ylim=(-0.08, 1.05))
    ax.axhline(0, color="black", lw=0.6)
    figure.suptitle("C  what explains dropout's own effect", x=0.02, ha="left", fontsize=10)
    legend_below(figure, ax, 2)
