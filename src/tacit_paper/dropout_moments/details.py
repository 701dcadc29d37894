"""Dropout by moments in detail: all shapes, coefficients, accuracies and costs."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.dropout.figure import legend_below
from tacit_paper.dropout.selecting import select
from tacit_paper.dropout_moments.figure import (
    FAMILIES,
    network_names,
    plot_arms,
    plot_by_network,
)

COEFFICIENT_LIMITS = (-0.3, 1.7)
COSTS = {
    "explicit_dropout_passes": FAMILIES["explicit_dropout"],
    "dropout_moments_passes": FAMILIES["dropout_moments"],
}


def plot_details(rows: Table) -> "plots.Figure":
    """(A, B) All networks of either setting; (C) accuracies; (D) costs of columns."""
    with plots.style():
        figure = plots.new_figure(11.5, 10.5)
        parts: Any = figure.subfigures(2, 1, height_ratios=[1.5, 1])
        _plot_settings(parts[0], rows)
        _plot_rest(parts[1], rows)
    return figure


def _plot_settings(figure: Any, rows: Table) -> None:
    """Explained fractions above coefficients over theory, for every network of either setting."""
    kinds = {"paper": "A  the paper's networks", "every layer": "B  dropout after every layer"}
    tables = {kind: _with_ratios(network_names(select(rows, kind=kind))) for kind in kinds}
    counts = [max(3, table.network.nunique()) for table in tables.values()]
    grid: Any = figure.subplots(2, 2, width_ratios=counts, sharex="col", sharey="row")
    joint = {"joint_all_explained": ("black", "_", "all jointly")}
    for column, (kind, table) in enumerate(tables.items()):
        explained, ratio = grid[:, column]
        fractions = {f"{name}_explained": style for name, style in FAMILIES.items()}
        plot_by_network(explained, table, fractions | joint)
        explained.set_title(kinds[kind], loc="left")
        plot_by_network(ratio, table, _ratios())
        ratio.axhline(1, color="black", ls="--", lw=1)
        ratio.set_xlabel("network and dropout rate q")
        for ax in (explained, ratio):
            ax.axhline(0, color="black", lw=0.6)
    grid[0, 0].set(ylabel="explained fraction", ylim=(-0.08, 1.08))
    grid[1, 0].set(ylabel="coefficient ÷ theory", ylim=COEFFICIENT_LIMITS)
    legend_below(figure, grid[0, 0], 4)


def _ratios() -> dict[str, tuple[str, str, str]]:
    return {f"{name}_ratio": FAMILIES[name] for name in ("explicit_dropout", "dropout_moments")}


def _with_ratios(rows: Table) -> Table:
    """Rows with coefficients over theory, which is q/(1−q) for second order and 1 for moments."""
    ratio = rows.explicit_dropout_strength / rows.theory
    low, high = COEFFICIENT_LIMITS
    return rows.assign(
        explicit_dropout_ratio=ratio.clip(low, high),
        dropout_moments_ratio=rows.dropout_moments_strength,
    )


def _plot_rest(figure: Any, rows: Table) -> None:
    """Test accuracies of retrained networks against dropout's, and costs of columns."""
    left, right = figure.subfigures(1, 2)
    ax: Any = left.subplots()
    retrained = select(rows, kind="retrained")
    gained = 100 * (retrained.test_accuracy - retrained.dropout_accuracy)
    plot_arms(ax, retrained.assign(gained=gained), "gained")
    ax.axhline(0, color="black", lw=0.6)
    ax.set_yscale("symlog", linthresh=1)  # linear between −1 and 1
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylabel("accuracy minus the dropout\nnetwork's, percentage points")
    ax.set_title("C  test accuracy of retrained networks", loc="left")
    legend_below(left, ax, 3)
    _plot_costs(right, rows)


def _plot_costs(figure: Any, rows: Table) -> None:
    """What a column costs in gradient passes, by shape."""
    ax: Any = figure.subplots()
    costs = rows[rows.kind.str.endswith(", cost")].sort_values(["depth", "width"])
    shapes = [f"{d:g}×{w:g}" for d, w in zip(costs.depth, costs.width, strict=True)]
    costs = costs.assign(
        network=shapes,
        explicit_dropout_passes=costs.explicit_dropout_seconds / costs.gradient_seconds,
        dropout_moments_passes=costs.dropout_moments_seconds / costs.gradient_seconds,
    )
    plot_by_network(ax, costs, COSTS)
    ax.set(yscale="log", ylabel="gradient passes", xlabel="network")
    ax.set_title("D  cost of one column", loc="left")
    legend_below(figure, ax, 2)
