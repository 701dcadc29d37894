"""The elastic-net figure, drawn from its rows."""

from itertools import product
from math import log10
from typing import Any

import numpy as np

from tacit_paper import Table, plots
from tacit_paper.elastic_net.checks import median_errors, select_estimate

SYMBOLS = {"l1": "λ₁", "l2": "λ₂"}
HATS = {"l1": "λ̂₁", "l2": "λ̂₂"}
ESTIMATES = {"last": "last weights", "drift": "epoch mean + drift"}


def plot(rows: Table) -> "plots.Figure":
    """Estimated against true strengths, errors by cell, and where the published fit stops."""
    with plots.style():
        figure = plots.new_figure(12.5, 10.5)
        grid = figure.add_gridspec(3, 1, height_ratios=(1, 1, 1.1))
        panels: dict[str, Any] = {}
        for number, letters in enumerate(("AB", "CD", "EFGHIJ")):
            places: Any = grid[number].subgridspec(1, len(letters))
            panels |= {a: figure.add_subplot(s) for a, s in zip(letters, places, strict=True)}
        combinations = product(ESTIMATES.items(), SYMBOLS)
        for a, e, ((estimate, label), strength) in zip("ABCD", "EFGH", combinations, strict=True):
            chosen = select_estimate(rows, estimate)
            _plot_estimates(panels[a], chosen, strength)
            panels[a].set_title(f"{a}  {SYMBOLS[strength]} recovered: {label}")
            errors = median_errors(chosen)
            _plot_cells(panels[e], errors[f"{strength}_error"], errors.flagged >= 0.5)
            panels[e].set_title(f"{e}  Error of {HATS[strength]}:\n{label}")
        published = select_estimate(rows, "published").groupby(["l1", "l2"])
        for letter, strength in zip("IJ", SYMBOLS, strict=True):
            distances = published[f"{strength}_distance"].median()
            _plot_cells(panels[letter], distances, distances < 0)
            title = f"{letter}  Published fit of {HATS[strength]}:\ndistance from exact"
            panels[letter].set_title(title)
        panels["E"].set_ylabel("true λ₁")
        cells = [panels[letter] for letter in "EFGHIJ"]
        bar = figure.colorbar(cells[0].images[0], ax=cells, location="bottom", aspect=60)
        bar.set_label(
            "median over data sets of the relative error (E–H) or distance from the exact solution "
            "(I, J); hatched: a Problem in at least half of the data sets"
        )
    return figure


def _plot_estimates(axes: Any, rows: Table, strength: str) -> None:
    """Median estimate over data sets against the true value, one line per value of the other.

    Bars are the interval of a single run where there is one (its median ends), and otherwise the
    middle half of all data sets.
    """
    import matplotlib as mpl

    other = "l2" if strength == "l1" else "l1"
    truth, values = (sorted(rows[name].unique()) for name in (strength, other))
    axes.plot(truth, truth, color="black", ls="--", lw=1, label="exact", zorder=1)
    lowest = min(truth) / 30
    for i, value in enumerate(values):
        colour = mpl.colormaps["viridis"](0.92 * i / max(1, len(values) - 1))
        cells = rows[rows[other] == value].groupby(strength)
        quartiles = cells[f"{strength}_hat"].quantile([0.25, 0.5, 0.75]).unstack()
        flagged = (cells.problems.agg(lambda kinds: (kinds != "").mean()) >= 0.5).to_numpy()
        shift = 1.13 ** (i - (len(values) - 1) / 2)
        x, median = quartiles.index.to_numpy() * shift, quartiles[0.5].to_numpy()
        positive = median > 0
        ends = quartiles[[0.25, 0.75]].to_numpy().T
        if rows.estimate.iloc[0] == "drift":
            ends = cells[[f"{strength}_low", f"{strength}_high"]].median().to_numpy().T
        low, high = (end[positive].clip(lowest) for end in ends)
        axes.vlines(x[positive], low, high, color=colour, lw=1.2)
        label = f"{SYMBOLS[other]} = {value:g}"
        axes.plot(x[positive], median[positive], color=colour, lw=0.9, label=label)
        for face, shown in ((colour, positive & ~flagged), ("white", positive & flagged)):
            axes.plot(x[shown], median[shown], "o", ms=4.5, mfc=face, mec=colour, ls="none")
        if not positive.all():
            crosses = [lowest] * (~positive).sum()
            axes.plot(x[~positive], crosses, "x", color=colour, ms=6, clip_on=False)
    axes.set(xscale="log", yscale="log", xlabel=f"true {SYMBOLS[strength]}", ylabel=HATS[strength])
    axes.set_ylim(lowest, max(truth) * 60)
    axes.plot([], [], "o", mfc="white", mec="black", ms=4.5, label="carries a Problem")
    axes.plot([], [], "x", color="black", ms=6, label="below zero")
    axes.legend(ncols=3, fontsize=7, loc="upper left")


def _plot_cells(axes: Any, values: Table, hatched: Table) -> None:
    """One number per cell of true strengths, on a logarithmic colour scale."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    table, hatching = values.unstack(), hatched.unstack()
    colours = {"norm": LogNorm(1e-3, 10), "cmap": "RdYlBu_r"}
    axes.imshow(table.clip(1e-3, 10), origin="lower", aspect="auto", **colours)
    hatch = {"fill": False, "hatch": "////", "lw": 0, "ec": "black", "alpha": 0.35}
    for (i, j), value in np.ndenumerate(table):
        colour = "white" if value < 4e-3 or value > 3 else "black"
        axes.text(j, i, _format_error(value), ha="center", va="center", fontsize=6, color=colour)
        if hatching.iloc[i, j]:
            axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, **hatch))
    axes.set_xticks(range(len(table.columns)), map(_format_strength, table.columns))
    axes.set_yticks(range(len(table.index)), map(_format_strength, table.index))
    axes.tick_params(labelsize=6.5)
    axes.set_xlabel("true λ₂")
    axes.grid(visible=False)


def _format_error(value: float) -> str:
    """A relative error in about three characters."""
    if value < 0.0095:
        return "<1%"
    return f"{value:.0%}" if value < 9.5 else ">9×"


def _format_strength(value: float) -> str:
    """A strength in few characters, as a power of ten where it is small."""
    return f"{value:g}" if value >= 0.01 else f"$10^{{{round(log10(value))}}}$"
