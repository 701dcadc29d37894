"""Details of the elastic-net figure: errors by cell, and networks trained with |θ| itself."""

from math import log10
from typing import Any

import numpy as np

from tacit_paper import Table, plots
from tacit_paper.elastic_net.checks import median_errors, select_estimate
from tacit_paper.elastic_net.figure import HATS, SYMBOLS

NONSMOOTH = {
    "published": ("as published, last weights", plots.RED, "s"),
    "last": ("exact fit, last weights", plots.ORANGE, "D"),
    "nonzero": ("the same, weights away from zero only", plots.GREEN, "^"),
    "drift": ("exact fit, means over epochs", plots.BLUE, "o"),
}
"""Estimates of the networks trained with |θ|: label, colour and marker."""


def plot_details(rows: Table) -> "plots.Figure":
    """Errors by cell, where the published fit stops, and networks trained with |θ| itself."""
    with plots.style():
        figure = plots.new_figure(9.6, 9.6)
        grid = figure.add_gridspec(3, 3, height_ratios=(1, 1, 0.95))
        letters = iter("ABCDEF")
        for i, strength in enumerate(SYMBOLS):
            for j, (title, values, hatched) in enumerate(_tables(rows, strength)):
                axes: Any = figure.add_subplot(grid[i, j])
                _plot_cells(axes, values, hatched)
                axes.set_title(f"{next(letters)}  {title}")
                axes.set_xlabel("true λ₂", fontsize=10)
                axes.set_ylabel("true λ₁" if j == 0 else "", fontsize=10)
        heat_maps = list(figure.axes)
        bar = figure.colorbar(heat_maps[0].images[0], ax=heat_maps, location="right", aspect=45)
        bar.set_label("median over data sets (hatched: half carry a Problem)", fontsize=10)
        bar.set_ticks([0.001, 0.01, 0.1, 1, 10], labels=["0.1 %", "1 %", "10 %", "100 %", "10×"])
        if (rows.estimate == "nonsmooth last").any():
            _plot_nonsmooth(figure.add_subplot(grid[2, :]), rows)
    return figure


def _tables(rows: Table, strength: str) -> list[tuple[str, Table, Table]]:
    """Title, one number per cell and what is hatched, for the heat maps of one strength."""
    hat, tables = HATS[strength], []
    for estimate, label in (("last", "last weights"), ("drift", "means over epochs")):
        errors = median_errors(select_estimate(rows, estimate))
        title = f"Error of {hat}, {label}"
        tables.append((title, errors[f"{strength}_error"], errors.flagged >= 0.5))
    published = select_estimate(rows, "published").groupby(["l1", "l2"])
    distances = published[f"{strength}_distance"].median()
    return [*tables, (f"{hat}: published fit to exact", distances, distances < 0)]


def _plot_cells(axes: Any, values: Table, hatched: Table) -> None:
    """One number per cell of true strengths, on a logarithmic colour scale."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    table, hatching = values.unstack(), hatched.unstack()
    colours = {"norm": LogNorm(1e-3, 10), "cmap": "RdYlBu_r"}
    axes.imshow(table.clip(1e-3, 10), origin="lower", aspect="auto", **colours)
    hatch = {"fill": False, "hatch": "///", "lw": 0, "ec": "black", "alpha": 0.25}
    for (i, j), value in np.ndenumerate(table):
        colour = "white" if value < 4e-3 or value > 3 else "black"
        axes.text(j, i, _format_error(value), ha="center", va="center", fontsize=8.5, color=colour)
        if hatching.iloc[i, j]:
            axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, **hatch))
    axes.set_xticks(range(len(table.columns)), map(_format_strength, table.columns))
    axes.set_yticks(range(len(table.index)), map(_format_strength, table.index))
    axes.tick_params(labelsize=9)
    axes.grid(visible=False)


def _plot_nonsmooth(axes: Any, rows: Table) -> None:
    """λ̂₁/λ₁ of the networks trained with |θ|, by cell: median and middle half of the data sets."""
    tables = {name: rows[rows.estimate == f"nonsmooth {name}"] for name in NONSMOOTH}
    cells = sorted(set(zip(tables["last"].l1, tables["last"].l2, strict=True)))
    lowest = 5e-4
    axes.axhline(1, color="black", ls="--", lw=1)
    for k, (name, (label, colour, marker)) in enumerate(NONSMOOTH.items()):
        ratios = (tables[name].l1_hat / tables[name].l1).clip(lowest)
        grouped = ratios.groupby([tables[name].l1, tables[name].l2])
        low, middle, high = (grouped.quantile(q).loc[cells] for q in (0.25, 0.5, 0.75))
        x = np.arange(len(cells)) + 0.16 * (k - 1.5)
        axes.vlines(x, low, high, color=colour, lw=1.5)
        axes.plot(x, middle, marker, color=colour, ms=6.5, ls="none", label=label)
    crossing = tables["last"].groupby(["l1", "l2"]).crossing.median()
    labels = [f"λ₁ = {l1:g}, λ₂ = {l2:g}\n{crossing[l1, l2]:.0%} cross zero" for l1, l2 in cells]
    axes.set_xticks(range(len(cells)), labels)
    axes.tick_params(labelsize=9.5)
    axes.set(yscale="log", ylim=(lowest, 40), xlim=(-0.5, len(cells) - 0.5))
    axes.set_yticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
    axes.set_ylabel("λ̂₁ / λ₁", fontsize=11)
    axes.set_title("G  Trained with |θ| itself: share of λ₁ that is recovered")
    axes.legend(loc="upper center", ncols=2, fontsize=9.5)


def _format_error(value: float) -> str:
    """A relative error in about three characters."""
    if value < 0.0095:
        return "<1%"
    return f"{value:.0%}" if value < 9.5 else ">9×"


def _format_strength(value: float) -> str:
    """A strength in few characters, as a power of ten where it is small."""
    return f"{value:g}" if value >= 0.01 else f"$10^{{{round(log10(value))}}}$"
