"""The dropout figure in detail: all architectures."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.dropout.selecting import (
    architectures,
    has_columns,
    means_and_intervals,
    select,
)

FAMILIES = {
    "l2": (plots.GREY, "s", "ridge"),
    "layerwise_l2": (plots.GREEN, "v", "ridge by layer"),
    "weighted_l2": (plots.ORANGE, "^", "activation-weighted ridge"),
    "layerwise_weighted_l2": (plots.RED, "P", "… by layer"),
    "explicit_dropout": (plots.BLUE, "o", "second order (explicit dropout)"),
    "joint": ("black", "+", "ridge, weighted ridge, second order jointly"),
}
RATIO_LIMITS = (-0.6, 2.0)
"""Coefficients over theory that are drawn to scale; others are red arrows at the edge."""


def plot_details(rows: Table) -> "plots.Figure":
    """Four questions from top to bottom, with one column of panels per architecture."""
    shapes = architectures(rows)
    with plots.style():
        figure = plots.new_figure(max(8.0, 2.4 * len(shapes)), 8.8)
        _plot_architectures(figure, rows, shapes)
    return figure


def _plot_architectures(figure: Any, rows: Table, shapes: list[tuple[int, int]]) -> None:
    models, effects = select(rows, kind="model"), select(rows, kind="effect")
    grid: Any = figure.subplots(4, len(shapes), sharex=True, squeeze=False)
    image: Any = None
    for column, (depth, width) in enumerate(shapes):
        networks = select(models, depth=depth, width=width)
        of_shape = select(effects, depth=depth, width=width)
        best, last = (select(of_shape, weights=weights) for weights in ("best", "last"))
        image = _plot_published(grid[0, column], networks, models)
        _plot_total(grid[1, column], networks)
        _plot_explained(grid[2, column], best, last)
        _plot_coefficient(grid[3, column], best)
        means = (last.explicit_dropout_strength / last.theory).groupby(last.rate).mean()
        grid[3, column].plot(means.index, means, ":", color=plots.BLUE, lw=1.3)
        grid[0, column].set_title(f"{depth} layers of {width}")
        grid[3, column].set_xlabel("dropout rate q")
        for row in (0, 2, 3) if column else ():
            grid[row, column].tick_params(labelleft=False)
    margin = 0.1 * models.rate.max()
    grid[0, 0].set(xlim=(-margin, models.rate.max() + margin), ylabel="published fit: λ̂ of ridge")
    grid[1, 0].set_ylabel("exact: λ̂ of ridge")
    grid[2, 0].set_ylabel("marginal effect of dropout:\nexplained fraction")
    grid[3, 0].set_ylabel("second order:\ncoefficient ÷ q/(1−q)")
    bar = figure.colorbar(image, ax=list(grid[0]), pad=0.01, aspect=12)
    bar.set_label("its loss", fontsize=8)
    legend = max((ax.get_legend_handles_labels() for ax in grid[2]), key=lambda pair: len(pair[1]))
    figure.legend(*legend, loc="outside lower center", ncols=4 if len(shapes) > 3 else 2)


def _plot_published(axes: Any, rows: Table, models: Table) -> Any:
    """One dot per network, coloured by the loss of the fit, on scales shared by all models."""
    from matplotlib.colors import LogNorm

    scale = LogNorm(models.published_loss.min(), models.published_loss.max())
    image = axes.scatter(
        rows.rate, rows.published_l2, c=rows.published_loss, s=9, cmap="viridis", norm=scale
    )
    axes.set(yscale="log", ylim=(models.published_l2.min() / 3, models.published_l2.max() * 3))
    return image


def _plot_total(axes: Any, rows: Table) -> None:
    """Exact strengths with intervals over seeds, and the fraction that ridge explains."""
    axes.scatter(rows.rate, rows.total_l2 * 1e5, s=9, color=plots.BLUE, alpha=0.35, lw=0)
    _plot_means(axes, rows.assign(shown=rows.total_l2 * 1e5), "shown", "-", plots.BLUE)
    means = rows.groupby("rate").total_explained.mean()
    for i, (rate, explained) in enumerate(means.items()):
        if i in (0, len(means) // 2, len(means) - 1):
            axes.annotate(
                f"{explained:.1%}", (rate, 0.03), xycoords=("data", "axes fraction"),
                ha="center", fontsize=6.5, color=plots.GREY,
            )  # fmt: skip
    axes.set_title("×10⁻⁵; below: explained by ridge", fontsize=6.5, color=plots.GREY, pad=2)
    low, high = min(0, 1e5 * rows.total_l2.min()), 1e5 * rows.total_l2.max()
    axes.set_ylim(low - 0.25 * (high - low), high + 0.1 * (high - low))
    axes.axhline(0, color="black", lw=0.6)


def _plot_means(
    axes: Any, rows: Table, column: str, form: str, colour: str, label: str | None = None
) -> None:
    """Means over networks by rate, with their intervals."""
    rates, means, errors = means_and_intervals(rows, column)
    style = {"fmt": form, "color": colour, "label": label, "ms": 3.5, "lw": 1.1, "elinewidth": 0.9}
    axes.errorbar(rates, means, errors, **style)


def _plot_explained(axes: Any, best: Table, last: Table) -> None:
    """The fraction of the marginal effect of dropout that each family explains."""
    for name, (colour, marker, label) in FAMILIES.items():
        if has_columns(best, f"{name}_explained"):
            form = marker if name == "joint" else marker + "-"
            _plot_means(axes, best, f"{name}_explained", form, colour, label)
    means = last.groupby("rate").explicit_dropout_explained.mean()
    label = "second order at the last weights"
    axes.plot(means.index, means, ":", color=plots.BLUE, lw=1.3, label=label)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_ylim(-0.08, 1.05)


def _plot_coefficient(axes: Any, best: Table) -> None:
    """The coefficient of the second-order penalty over its theory value."""
    low, high = RATIO_LIMITS
    ratio = best.explicit_dropout_strength / best.theory
    shown, flagged = ratio.clip(low, high), best.explicit_dropout_problems != ""
    for marker, outside in (("^", ratio > high), ("v", ratio < low)):
        if outside.any():
            axes.plot(best.rate[outside], shown[outside], marker, color=plots.RED, ms=7, zorder=0)
    axes.plot(best.rate[~flagged], shown[~flagged], "o", color=plots.BLUE, ms=4)
    axes.plot(best.rate[flagged], shown[flagged], "o", mfc="white", mec=plots.BLUE, ms=4)
    rates, means, errors = means_and_intervals(best.assign(ratio=ratio), "ratio")
    axes.errorbar(rates, means, errors, fmt="none", ecolor=plots.BLUE, elinewidth=0.9, zorder=0)
    axes.axhline(1, color="black", ls="--", lw=1)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_ylim(low - 0.1, high + 0.1)
