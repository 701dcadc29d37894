"""The dropout figure, drawn from its rows."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.dropout.checks import select

FAMILIES = {
    "l2": (plots.GREY, "s", "ridge"),
    "layerwise_l2": (plots.GREEN, "v", "ridge by layer"),
    "weighted_l2": (plots.ORANGE, "^", "activation-weighted ridge"),
    "layerwise_weighted_l2": (plots.RED, "D", "… by layer"),
    "explicit_dropout": (plots.BLUE, "o", "explicit dropout"),
}
RATIO_LIMITS = (-0.6, 2.0)
"""Coefficients over theory that are drawn to scale; others are red arrows at the edge."""


def plot(rows: Table) -> "plots.Figure":
    """One column of panels per architecture; four questions from top to bottom."""
    models = select(rows, kind="model")
    shapes = sorted({(int(d), int(w)) for d, w in zip(models.depth, models.width, strict=True)})
    with plots.style():
        figure = plots.new_figure(max(7.0, 2.35 * len(shapes)), 9.6)
        grid: Any = figure.subplots(4, len(shapes), sharex=True, sharey="row", squeeze=False)
        image: Any = None
        for column, (depth, width) in enumerate(shapes):
            networks = select(models, depth=depth, width=width)
            effects = select(rows, kind="effect", depth=depth, width=width)
            best, last = (select(effects, weights=weights) for weights in ("best", "last"))
            image = _plot_published(grid[0, column], networks, models)
            _plot_total(grid[1, column], networks)
            _plot_explained(grid[2, column], best, last)
            _plot_coefficient(grid[3, column], best, last)
            grid[0, column].set_title(f"{depth} layers of {width}")
            grid[3, column].set_xlabel("dropout rate q")
        highest = models.rate.max()
        limits = (-0.1 * highest, highest + 0.1 * highest)
        grid[0, 0].set(xlim=limits, ylabel="published fit: λ̂ of ridge")
        grid[1, 0].set_ylabel("exact: λ̂ of ridge")
        grid[2, 0].set_ylabel("marginal effect of dropout:\nexplained fraction")
        grid[3, 0].set_ylabel("explicit dropout:\ncoefficient ÷ q/(1−q)")
        bar = figure.colorbar(image, ax=list(grid[0]), pad=0.01, aspect=12)
        bar.set_label("its loss", fontsize=8)
        legend = grid[2, 0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=6 if len(shapes) > 3 else 3)
    return figure


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
    axes.scatter(rows.rate, rows.total_l2, s=9, color=plots.BLUE, alpha=0.35, lw=0)
    means = rows.groupby("rate")[["total_l2", "total_explained"]].mean()
    axes.plot(means.index, means.total_l2, color=plots.BLUE)
    _plot_intervals(axes, rows.rate, rows.total_l2, color=plots.BLUE, lw=1.6)
    for i, (rate, row) in enumerate(means.iterrows()):
        if i in (0, len(means) // 2, len(means) - 1):
            axes.annotate(
                f"{row.total_explained:.1%}", (rate, 0.87), xycoords=("data", "axes fraction"),
                ha="center", fontsize=6, color=plots.GREY,
            )  # fmt: skip
    axes.set_title("explained by ridge:", fontsize=6.5, color=plots.GREY, loc="left", pad=1)
    axes.margins(y=0.3)
    axes.axhline(0, color="black", lw=0.6)


def _plot_intervals(axes: Any, rates: Any, values: Any, **style: Any) -> None:
    """95 % intervals of the mean over networks that differ in start, batches and masks."""
    intervals = values.groupby(rates).agg(lambda group: plots.interval(group.tolist()))
    lows, highs = [low for low, _ in intervals], [high for _, high in intervals]
    axes.vlines(intervals.index, lows, highs, **style)


def _plot_explained(axes: Any, best: Table, last: Table) -> None:
    """The fraction of the marginal effect of dropout that each family explains."""
    for name, (colour, marker, label) in FAMILIES.items():
        explained = best[f"{name}_explained"]
        means = explained.groupby(best.rate).mean()
        axes.plot(means.index, means, marker + "-", color=colour, ms=3.5, lw=1.1, label=label)
        _plot_intervals(axes, best.rate, explained, color=colour, lw=0.9)
    means = last.groupby("rate").explicit_dropout_explained.mean()
    axes.plot(means.index, means, ":", color=plots.BLUE, lw=1.3, label="… at the last weights")
    axes.axhline(0, color="black", lw=0.6)
    axes.set_ylim(-0.08, 1.03)


def _plot_coefficient(axes: Any, best: Table, last: Table) -> None:
    """The coefficient of explicit dropout over its theory value."""
    low, high = RATIO_LIMITS
    ratio = best.explicit_dropout_strength / best.theory
    shown = ratio.clip(low, high)
    flagged = best.explicit_dropout_problems != ""
    for marker, outside in (("^", ratio > high), ("v", ratio < low)):
        if outside.any():
            axes.plot(best.rate[outside], shown[outside], marker, color=plots.RED, ms=7, zorder=0)
    axes.plot(best.rate[~flagged], shown[~flagged], "o", color=plots.BLUE, ms=4)
    axes.plot(best.rate[flagged], shown[flagged], "o", mfc="white", mec=plots.BLUE, ms=4)
    _plot_intervals(axes, best.rate, ratio, color=plots.BLUE, lw=0.9, zorder=0)
    means = (last.explicit_dropout_strength / last.theory).groupby(last.rate).mean()
    axes.plot(means.index, means, ":", color=plots.BLUE, lw=1.3)
    axes.axhline(1, color="black", ls="--", lw=1)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_ylim(low - 0.1, high + 0.1)
