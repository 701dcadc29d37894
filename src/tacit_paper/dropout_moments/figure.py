"""Dropout by moments at a glance: what it explains, and networks trained with it."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.dropout.figure import FAMILIES as OTHERS
from tacit_paper.dropout.figure import LINES, legend_below
from tacit_paper.dropout.selecting import means_and_intervals, select

PURPLE = "#7b4fa3"
FAMILIES = {**OTHERS, "dropout_moments": (PURPLE, "D", "moments (new)")}
ARMS = {
    "nothing": ("black", "x", "no penalty"),
    "published ridge": (plots.RED, "v", "ridge, published λ̂"),
    "ridge": (plots.GREY, "s", "ridge, exact λ̂"),
    "explicit, estimated": (plots.GREEN, "^", "second order, estimated"),
    "explicit": (plots.BLUE, "o", "second order, q/(1−q)"),
    "moments": (PURPLE, "D", "moments, coefficient 1"),
    "dropout again": (plots.ORANGE, "*", "dropout again, other masks"),
}


def plot(rows: Table) -> "plots.Figure":
    """(A) The paper's networks; (B) dropout after every hidden layer; (C) retraining."""
    with plots.style():
        figure = plots.new_figure(11.5, 4.4)
        parts: Any = figure.subfigures(1, 3, width_ratios=[1, 1.25, 1.1])
        _plot_paper(parts[0], select(rows, kind="paper"))
        _plot_every_layer(parts[1], select(rows, kind="every layer"))
        _plot_retraining(parts[2], select(rows, kind="retrained"))
    return figure


def _plot_paper(figure: Any, rows: Table) -> None:
    """The fraction that each family explains against the rate, for one network of each depth."""
    ax: Any = figure.subplots()
    shapes = [_most_seeds(select(rows, depth=depth)) for depth in sorted(rows.depth.unique())]
    for (depth, width), line in zip(shapes, LINES, strict=False):
        networks = select(rows, depth=depth, width=width)
        for name, (colour, marker, label) in FAMILIES.items():
            groups = {q: g.tolist() for q, g in networks.groupby("rate")[f"{name}_explained"]}
            means = [sum(values) / len(values) for values in groups.values()]
            first = label if line == LINES[0] else None
            ax.plot(list(groups), means, marker + line, color=colour, ms=4.5, lw=1.3, label=first)
            for rate, values in groups.items():
                ax.vlines(rate, *_bar(values), color=colour, lw=0.9)
    styles = zip(shapes, ("solid", "dashed", "dotted"), strict=False)
    ax.set_title(", ".join(f"{depth}×{width} {style}" for (depth, width), style in styles))
    ax.set(xlabel="dropout rate q", ylabel="explained fraction", ylim=(-0.08, 1.08))
    ax.axhline(0, color="black", lw=0.6)
    figure.suptitle("A  the paper's networks", x=0.02, ha="left", fontsize=10)
    legend_below(figure, ax, 2)


def _bar(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean; of one or two values, their range."""
    return plots.interval(values) if len(values) > 2 else (min(values), max(values))


def _most_seeds(rows: Table) -> tuple[int, int]:
    """Depth and width of the shape with most networks, a middle width before others."""
    counts = rows.groupby(["depth", "width"]).size()
    widths = sorted(rows.width.unique())
    middle = widths[(len(widths) - 1) // 2]
    depth, width = max(counts.index, key=lambda shape: (counts[shape], shape[1] == middle))
    return int(depth), int(width)


def network_names(rows: Table) -> Table:
    """Rows in order, with the name of their network for an axis in `network`."""
    rows = rows.sort_values(["depth", "width", "rate"])
    shapes = zip(rows.depth, rows.width, rows.rate, strict=True)
    return rows.assign(network=[f"{d:g}×{w:g}\n{q:g}" for d, w, q in shapes])


def plot_by_network(ax: Any, rows: Table, columns: dict[str, tuple[str, str, str]]) -> None:
    """Means over seeds with intervals, one position per network and one colour per column."""
    networks = list(dict.fromkeys(rows.network))
    for place, (column, (colour, marker, label)) in enumerate(columns.items()):
        shift = 0.16 * (place - (len(columns) - 1) / 2)
        for number, network in enumerate(networks):
            values = select(rows, network=network)[column].tolist()
            ax.vlines(number + shift, *_bar(values), color=colour, lw=1)
            mean, first = sum(values) / len(values), label if number == 0 else None
            ax.plot(number + shift, mean, marker, color=colour, ms=5, label=first)
    ax.set_xticks(range(len(networks)), networks, fontsize=7.5)
    ax.set_xlim(-0.5, len(networks) - 0.5)


def _plot_every_layer(figure: Any, rows: Table) -> None:
    """The fraction that each family explains with dropout after every hidden layer."""
    ax: Any = figure.subplots()
    columns = {f"{name}_explained": style for name, style in FAMILIES.items()}
    plot_by_network(ax, network_names(rows), columns)
    ax.set(ylabel="explained fraction", ylim=(-0.08, 1.08), xlabel="network and dropout rate q")
    ax.set_title("trained by Adam")
    ax.axhline(0, color="black", lw=0.6)
    figure.suptitle("B  dropout after every hidden layer", x=0.02, ha="left", fontsize=10)
    legend_below(figure, ax, 2)


def _plot_retraining(figure: Any, rows: Table) -> None:
    """The divergence of penalised networks from the dropout network, for each arm and rate."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax: Any = figure.subplots()
    plot_arms(ax, rows, "divergence")
    depth, width = (int(rows[name].iloc[0]) for name in ("depth", "width"))
    title = f"{depth}×{width}, KL from the dropout network"
    ax.set(title=title, yscale="log", ylabel="Kullback–Leibler divergence")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    figure.suptitle("C  trained with a penalty in place of dropout", x=0.02, ha="left", fontsize=10)
    legend_below(figure, ax, 2)


def plot_arms(ax: Any, rows: Table, column: str) -> None:
    """A number of the retrained networks: one position per rate, one marker per arm."""
    rates = sorted(rows.rate.unique())
    for place, (name, (colour, marker, label)) in enumerate(ARMS.items()):
        shift = 0.11 * (place - (len(ARMS) - 1) / 2)
        _, means, errors = means_and_intervals(select(rows, penalty=name), column, rates)
        x = [number + shift for number in range(len(rates))]
        ax.errorbar(x, means, errors, fmt=marker, color=colour, ms=5, elinewidth=1, label=label)
    ax.set(xlabel="dropout rate q", xlim=(-0.6, len(rates) - 0.4))
    ax.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
