"""The elastic-net figure, drawn from its rows: as published beside the estimate from epochs."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.elastic_net.checks import select_estimate

SYMBOLS = {"l1": "λ₁", "l2": "λ₂"}
HATS = {"l1": "λ̂₁", "l2": "λ̂₂"}
SHOWN = {
    "published": "As published (last weights, Adam's fit)",
    "drift": "Exact fit to means over epochs",
}
"""Estimates of the first figure, by column."""


def plot(rows: Table) -> "plots.Figure":
    """Estimated against true strengths: the published fit on the left, means of epochs beside it.

    Marks are shifted a little along x, so that those of one true value can be told apart.
    """
    with plots.style():
        figure = plots.new_figure(9.4, 8.6)
        panels: Any = figure.subplots(2, 2, sharey=True)
        letters = iter("ABCD")
        for line, strength in zip(panels, SYMBOLS, strict=True):
            for axes, (estimate, label) in zip(line, SHOWN.items(), strict=True):
                _plot_strength(axes, select_estimate(rows, estimate), strength)
                axes.set_title(f"{next(letters)}  {label}", fontsize=11.5)
            line[0].set_ylabel(f"estimate {HATS[strength]}", fontsize=12)
        entries: Any = panels[0, 1].get_legend_handles_labels()
        title = "Colour: strength of the other penalty (λ₂ in A and B, λ₁ in C and D)"
        figure.legend(
            *entries, loc="outside lower center", ncols=5, fontsize=10.5, title=title,
            title_fontsize=10.5,
        )  # fmt: skip
    return figure


def _plot_strength(axes: Any, rows: Table, strength: str) -> None:
    """Estimates of one strength against its true value, one line per value of the other."""
    import matplotlib as mpl

    other = "l2" if strength == "l1" else "l1"
    truth, values = (sorted(rows[name].unique()) for name in (strength, other))
    lowest = min(truth) / 5
    axes.plot(truth, truth, color="black", ls="--", lw=1, label="true value", zorder=1)
    for i, value in enumerate(values):
        colour = mpl.colormaps["viridis"](0.92 * i / max(1, len(values) - 1))
        cells = rows[rows[other] == value].groupby(strength)
        middle, low, high = summarise(cells, strength)
        flagged = (cells.problems.agg(lambda kinds: (kinds != "").mean()) >= 0.5).to_numpy()
        if rows.estimate.iloc[0] == "published":
            flagged = flagged & False  # the published fit has no Problems
        x = middle.index.to_numpy() * 1.13 ** (i - (len(values) - 1) / 2)
        positive, middle = (middle > 0).to_numpy(), middle.to_numpy()
        ends = (end.to_numpy()[positive].clip(lowest) for end in (low, high))
        axes.vlines(x[positive], *ends, color=colour, lw=1.5)
        axes.plot(x[positive], middle[positive], color=colour, lw=1.2, label=f"{value:g}")
        for face, shown in ((colour, positive & ~flagged), ("white", positive & flagged)):
            axes.plot(x[shown], middle[shown], "o", ms=5.5, mfc=face, mec=colour, ls="none")
        if not positive.all():
            crosses = [lowest] * (~positive).sum()
            axes.plot(x[~positive], crosses, "x", color=colour, ms=7, mew=1.6, clip_on=False)
    axes.set(xscale="log", yscale="log", ylim=(lowest, max(truth) * 3))
    axes.set_xlabel(f"true {SYMBOLS[strength]}", fontsize=12)
    axes.tick_params(labelsize=11, labelleft=True)
    axes.plot([], [], "o", mfc="white", mec="black", ms=5.5, label="carries a Problem")
    axes.plot([], [], "x", color="black", ms=7, mew=1.6, label="below zero")


def summarise(cells: Any, strength: str) -> tuple[Table, Table, Table]:
    """Middle and ends of the bar of every cell.

    The published fit is drawn as published, mean ± standard error over data sets. The estimate from
    epochs has the interval of a single run: medians over data sets of the strength and its ends.
    """
    estimates = cells[f"{strength}_hat"]
    if (cells.estimate.first() == "published").all():
        mean, error = estimates.mean(), estimates.sem()
        return mean, mean - error, mean + error
    return estimates.median(), cells[f"{strength}_low"].median(), cells[f"{strength}_high"].median()
