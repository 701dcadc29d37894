"""The picture of `dropout`, from its rows alone."""

from typing import TYPE_CHECKING, Any

from tacit_paper import Table, plots
from tacit_paper.dropout_check import effects, models

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAMILIES = {
    "l2": (plots.GREY, "s", "ridge"),
    "layerwise_l2": (plots.GREEN, "v", "ridge by layer"),
    "weighted_l2": (plots.ORANGE, "^", "activation-weighted ridge"),
    "layerwise_weighted_l2": (plots.RED, "D", "… by layer"),
    "explicit_dropout": (plots.BLUE, "o", "explicit dropout"),
}


SHOWN = (-0.6, 2.0)
"""Coefficients over theory that are drawn to scale; beyond them a red arrow at the edge."""


def plot(rows: Table) -> "Figure":
    """One column an architecture; four questions from top to bottom."""
    every = models(rows)
    shapes = sorted({(int(d), int(w)) for d, w in zip(every.depth, every.width, strict=True)})
    with plots.style():
        figure = plots.new_figure(max(7.0, 2.35 * len(shapes)), 9.6)
        grid: Any = figure.subplots(4, len(shapes), sharex=True, sharey="row", squeeze=False)
        image: Any = None
        for column, (depth, width) in enumerate(shapes):
            own = every[(every.depth == depth) & (every.width == width)]
            here = rows[(rows.depth == depth) & (rows.width == width)]
            image = _published(grid[0, column], own, every)
            _total(grid[1, column], own)
            _explained(grid[2, column], effects(here, "best"), effects(here, "last"))
            _coefficient(grid[3, column], effects(here, "best"), effects(here, "last"))
            grid[0, column].set_title(f"{depth} layers of {width}")
            grid[3, column].set_xlabel("dropout rate q")
        room = 0.1 * every.rate.max()
        grid[0, 0].set_xlim(-room, every.rate.max() + room)
        grid[0, 0].set_ylabel("published fit: λ̂ of ridge")
        grid[1, 0].set_ylabel("exact: λ̂ of ridge")
        grid[2, 0].set_ylabel("dropout's own effect:\nexplained fraction")
        grid[3, 0].set_ylabel("explicit dropout:\ncoefficient ÷ q/(1−q)")
        bar = figure.colorbar(image, ax=list(grid[0]), pad=0.01, aspect=12)
        bar.set_label("its loss", fontsize=8)
        handles, labels = grid[2, 0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=6 if len(shapes) > 3 else 3
        )
    return figure


def _published(axes: Any, rows: Table, every: Table) -> Any:
    """One dot a network, coloured by the fit's loss as in the paper."""
    from matplotlib.colors import LogNorm

    scale = LogNorm(every.published_loss.min(), every.published_loss.max())
    image = axes.scatter(
        rows.rate, rows.published_l2, c=rows.published_loss, s=9, cmap="viridis", norm=scale
    )
    axes.set_yscale("log")
    axes.set_ylim(every.published_l2.min() / 3, every.published_l2.max() * 3)
    return image


def _total(axes: Any, rows: Table) -> None:
    """Exact strengths with intervals over seeds, and how much ridge explains."""
    axes.scatter(rows.rate, rows.total_l2, s=9, color=plots.BLUE, alpha=0.35, lw=0)
    middle = rows.groupby("rate")[["total_l2", "total_explained"]].mean()
    axes.plot(middle.index, middle.total_l2, color=plots.BLUE)
    _bars(axes, rows.rate, rows.total_l2, color=plots.BLUE, lw=1.6)
    for i, (rate, row) in enumerate(middle.iterrows()):
        if i in (0, len(middle) // 2, len(middle) - 1):
            axes.annotate(
                f"{row.total_explained:.1%}", (rate, 0.87), xycoords=("data", "axes fraction"),
                ha="center", fontsize=6, color=plots.GREY,
            )  # fmt: skip
    axes.set_title("explained by ridge:", fontsize=6.5, color=plots.GREY, loc="left", pad=1)
    axes.margins(y=0.3)
    axes.axhline(0, color="black", lw=0.6)


def _bars(axes: Any, rates: Any, values: Any, **style: Any) -> None:
    """95 % intervals of the mean over networks that differ in start, batches and masks."""
    found = values.groupby(rates).agg(lambda own: plots.interval(own.tolist()))
    axes.vlines(found.index, [low for low, _ in found], [high for _, high in found], **style)


def _explained(axes: Any, best: Table, last: Table) -> None:
    """How much of dropout's own effect each family explains."""
    for name, (colour, mark, label) in FAMILIES.items():
        own = best[f"{name}_explained"]
        middle = own.groupby(best.rate).mean()
        axes.plot(middle.index, middle, mark + "-", color=colour, ms=3.5, lw=1.1, label=label)
        _bars(axes, best.rate, own, color=colour, lw=0.9)
    late = last.groupby("rate").explicit_dropout_explained.mean()
    axes.plot(late.index, late, ":", color=plots.BLUE, lw=1.3, label="… at the last weights")
    axes.axhline(0, color="black", lw=0.6)
    axes.set_ylim(-0.08, 1.03)


def _coefficient(axes: Any, best: Table, last: Table) -> None:
    """The explicit regularizer's coefficient over its theory value."""
    exact = best.explicit_dropout_strength / best.theory
    ratio = exact.clip(*SHOWN)
    flagged = best.explicit_dropout_problems != ""
    for mark, beyond in (("^", exact > SHOWN[1]), ("v", exact < SHOWN[0])):
        if beyond.any():
            axes.plot(best.rate[beyond], ratio[beyond], mark, color=plots.RED, ms=7, zorder=0)
    axes.plot(best.rate[~flagged], ratio[~flagged], "o", color=plots.BLUE, ms=4)
    axes.plot(best.rate[flagged], ratio[flagged], "o", mfc="white", mec=plots.BLUE, ms=4)
    _bars(axes, best.rate, exact, color=plots.BLUE, lw=0.9, zorder=0)
    late = (last.explicit_dropout_strength / last.theory).groupby(last.rate).mean()
    axes.plot(late.index, late, ":", color=plots.BLUE, lw=1.3)
    axes.axhline(1, color="black", ls="--", lw=1)
    axes.axhline(0, color="black", lw=0.6)
    axes.set_ylim(SHOWN[0] - 0.1, SHOWN[1] + 0.1)
