"""The figure of the bootstrap experiment, panels A to F, from its rows alone."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tacit_paper import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series

STUDENT = 1.96
"""Half-widths of a 95 % interval, in standard errors of the mean."""


def pick(rows: "DataFrame", panel: str, series: str) -> "DataFrame":
    """The rows of one curve of one panel."""
    return rows.loc[(rows.panel == panel) & (rows.series == series)]


def crossover(sigmas: Sequence[float], relative: Sequence[float]) -> float:
    """Where a curve falls through 1 for good, by interpolation of logarithms; NaN if nowhere."""
    x, y = np.log(np.asarray(sigmas)), np.log(np.asarray(relative))
    above = np.nonzero(y > 0)[0]
    if not len(above) or above[-1] == len(y) - 1:
        return math.nan
    k = above[-1]
    return float(np.exp(x[k] + (x[k + 1] - x[k]) * y[k] / (y[k] - y[k + 1])))


def crossovers(rows: "DataFrame") -> tuple[float, "Series"]:
    """σ from which the pairs bootstrap beats Λ̂ = 0: on the paper's draw, and on every further one.

    Both are of means over pools.
    """
    own = pick(rows, "F", "pairs").groupby("sigma").relative.mean()
    others = _further(rows)
    where: Any = others.apply(lambda line: crossover(list(others.columns), line), axis=1)
    return crossover(list(own.index), list(own)), where


def _further(rows: "DataFrame") -> "DataFrame":
    """Means over pools: a line for every further draw, a column for every σ."""
    return pick(rows, "F", "draw").groupby(["draw", "sigma"]).relative.mean().unstack()


def plot(rows: "DataFrame") -> "Figure":
    """Matrices above, distances to theory below."""
    with plots.style():
        figure: Any = plots.new_figure(11, 7)
        upper, lower = figure.subfigures(2, 1, height_ratios=[1, 1.55])
        _matrices(upper, rows)
        left, right = lower.subfigures(1, 2, wspace=0.02)
        _against_endpoints(_broken(left), rows)
        _against_noise(_broken(right), rows)
    return figure


def _matrices(figure: Any, rows: "DataFrame") -> None:
    """Panels A to D in one scale of colours."""
    entries = {panel: pick(rows, panel, "entry") for panel in "ABCD"}
    names = {
        "A": f"A   Theory Λ({entries['A'].t.iloc[0]:.0f})",
        "B": "B   One endpoint, least norm",
        "C": f"C   Pairs bootstrap, m = {entries['C'].m.iloc[0]:.0f}",
        "D": f"D   Pairs bootstrap, m = {entries['D'].m.iloc[0]:.0f}",
    }
    largest = max(float(part.value.abs().max()) for part in entries.values())
    axes = figure.subplots(1, 4)
    image = None
    for axis, (panel, title) in zip(axes, names.items(), strict=True):
        matrix = entries[panel].pivot(index="i", columns="j", values="value").to_numpy()
        image = axis.imshow(matrix, cmap="RdBu_r", vmin=-largest, vmax=largest)
        axis.set_title(title)
        axis.set_xticks([0, len(matrix) - 1], ["1", str(len(matrix))])
        axis.set_yticks([0, len(matrix) - 1], ["1", str(len(matrix))])
        axis.grid(visible=False)
        axis.spines[:].set_visible(True)
    figure.colorbar(image, ax=list(axes), label="entry of Λ", shrink=0.85, pad=0.01)


def _broken(figure: Any) -> "tuple[Axes, Axes]":
    """Two axes, one above the other, for values near 1 and values near rounding."""
    near, tiny = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
    for axis in (near, tiny):
        axis.set_yscale("log")
    near.spines["bottom"].set_visible(False)
    near.tick_params(axis="x", which="both", length=0)
    slant = {"marker": [(-1, -0.6), (1, 0.6)], "markersize": 8, "linestyle": "none"}
    ink = {"color": "black", "mec": "black", "mew": 1, "clip_on": False}
    near.plot([0], [0], transform=near.transAxes, **slant, **ink)
    tiny.plot([0], [1], transform=tiny.transAxes, **slant, **ink)
    tiny.set_ylim(1e-15, 1e-8)
    tiny.set_yticks([1e-14, 1e-9])
    tiny.axhline(1e-9, color=plots.GREY, linewidth=0.8, linestyle=":")
    figure.supylabel("distance to theory  ‖Λ̂ − Λ‖ / ‖Λ‖", fontsize=9)
    return near, tiny


def _against_endpoints(axes: "tuple[Axes, Axes]", rows: "DataFrame") -> None:
    """Panel E: medians and ranges over pools, since means are ruled by single pools near m = p."""
    near, tiny = axes
    pairs = pick(rows, "E", "pairs")
    for series, colour in (("pairs", plots.BLUE), ("residual", plots.ORANGE)):
        pools = pick(rows, "E", series).groupby("m").relative
        middle = pools.median()
        for axis in axes:
            axis.plot(middle.index, middle, color=colour, label=f"{series}, median")
            axis.fill_between(middle.index, pools.min(), pools.max(), color=colour, alpha=0.2, lw=0)
        if series == "pairs":
            near.plot(middle.index, pools.mean(), ":", color=colour, lw=1, label="pairs, mean")
            shown = rows[(rows.series == "entry") & rows.m.notna()].groupby("panel").m.first()
            near.plot(shown, middle[list(shown)], "o", color=colour, ms=5)
            for letter, m in shown.items():
                near.annotate(
                    str(letter), (m, middle[m]), (0, 7), textcoords="offset points", ha="center",
                    color=colour, fontweight="bold",
                )  # fmt: skip
    _baseline(near, rows)
    near.set_ylim(0.2, 60)
    near.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    near.set_title(f"E   Against the number of endpoints, σ = {pairs.sigma.iloc[0]:g}")
    near.annotate(
        "m ≈ p: heavy tails", (10, float(pairs.relative.max())), (8, -3),
        textcoords="offset points", fontsize=8, color=plots.BLUE,
    )  # fmt: skip
    near.legend(loc="upper right", title="band: range over pools", title_fontsize=8)
    tiny.set_xlabel("endpoints m, the one on the data itself included")
    tiny.annotate(
        "residual: exact from m = p = 10", (0.97, 0.62), xycoords="axes fraction", ha="right",
        fontsize=8, color=plots.ORANGE,
    )  # fmt: skip


def _against_noise(axes: "tuple[Axes, Axes]", rows: "DataFrame") -> None:
    """Panel F: means and 95 % intervals over pools, and every further draw as a thin line."""
    near, tiny = axes
    own, others = crossovers(rows)
    lines = _further(rows)
    for k, (_, line) in enumerate(lines.iterrows()):
        label = f"pairs, {len(lines)} other draws" if not k else None
        near.plot(lines.columns, line, color=plots.GREY, alpha=0.35, lw=0.7, label=label)
    for series, colour in (("pairs", plots.BLUE), ("residual", plots.ORANGE)):
        pools = pick(rows, "F", series).groupby("sigma").relative
        middle, half = pools.mean(), STUDENT * pools.sem()
        for axis in axes:
            axis.plot(
                middle.index, middle, "o-", color=colour, ms=3.5, label=f"{series}, paper's draw"
            )
            low = (middle - half).clip(lower=middle / 10)
            axis.fill_between(middle.index, low, middle + half, color=colour, alpha=0.2, lw=0)
    _baseline(near, rows)
    near.plot(others, np.ones(len(others)), "|", color="black", ms=9, mew=0.8)
    near.plot([own], [1], "D", color=plots.BLUE, ms=6, mec="white", zorder=5)
    found = others.dropna()
    words = f"beats Λ̂ = 0 from σ ≈ {own:.1f}"
    if len(found):
        words += (
            f"\nother draws: {found.min():.1f} to {found.max():.1f}, median {found.median():.1f}"
        )
    near.annotate(
        words, (own, 1), (0.04, 0.1), textcoords="axes fraction", fontsize=8,
        arrowprops={"arrowstyle": "-", "color": plots.BLUE, "lw": 0.8},
    )  # fmt: skip
    near.set_xscale("log")
    near.set_ylim(0.2, 100)
    near.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    ticks = [0.5, 1, 2, 4, 6, 10, 20]
    tiny.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    tiny.set_xticks([], minor=True)
    size = pick(rows, "F", "pairs").m.iloc[0]
    near.set_title(f"F   Against the noise of the data, m = {size:.0f}")
    near.legend(loc="upper right", title="band: 95 % interval over pools", title_fontsize=8)
    tiny.set_xlabel("standard deviation σ of the noise")


def _baseline(axis: "Axes", rows: "DataFrame") -> None:
    norm = float(rows.baseline.dropna().iloc[0])
    axis.axhline(1, color="black", linestyle="--", linewidth=1, label=f"Λ̂ = 0  (‖Λ‖ = {norm:.4f})")
