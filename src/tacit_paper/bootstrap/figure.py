"""Drawing of the bootstrap figure, panels A to F, only from its rows."""

from typing import Any

import numpy as np

from tacit_paper import Table, plots
from tacit_paper.bootstrap.checks import crossovers, further_draws, select

COLOURS = {"pairs": plots.BLUE, "residual": plots.ORANGE}
STANDARD_ERRORS = 1.96
"""Half-width of a 95 % interval for the mean, in standard errors."""


def plot(rows: Table) -> "plots.Figure":
    """Matrices in the upper row, distances to theory in the lower row."""
    with plots.style():
        figure: Any = plots.new_figure(11, 7)
        upper, lower = figure.subfigures(2, 1, height_ratios=[1, 1.55])
        _draw_matrices(upper, rows)
        left, right = lower.subfigures(1, 2, wspace=0.02)
        _draw_by_endpoints(_broken_axes(left), rows)
        _draw_by_noise(_broken_axes(right), rows)
    return figure


def _draw_matrices(figure: Any, rows: Table) -> None:
    """Panels A to D on one colour scale."""
    entries = {panel: select(rows, panel, "entry") for panel in "ABCD"}
    titles = (
        f"A   Theory Λ({entries['A'].t.iloc[0]:.0f})",
        "B   One endpoint, min. norm",
        f"C   Pairs bootstrap, m = {entries['C'].m.iloc[0]:.0f}",
        f"D   Pairs bootstrap, m = {entries['D'].m.iloc[0]:.0f}",
    )
    limit = max(float(matrix.value.abs().max()) for matrix in entries.values())
    axes, image = figure.subplots(1, 4), None
    for axis, panel, title in zip(axes, entries.values(), titles, strict=True):
        matrix = panel.pivot(index="i", columns="j", values="value").to_numpy()
        image = axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set_title(title)
        axis.set_xticks([0, len(matrix) - 1], ["1", str(len(matrix))])
        axis.set_yticks([0, len(matrix) - 1], ["1", str(len(matrix))])
        axis.grid(visible=False)
        axis.spines[:].set_visible(True)
    figure.colorbar(image, ax=list(axes), label="entry of Λ", shrink=0.85, pad=0.01)


def _broken_axes(figure: Any) -> tuple[Any, Any]:
    """Two axes, one above the other: for distances near 1 and for distances near rounding."""
    large, tiny = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
    large.spines["bottom"].set_visible(False)
    large.tick_params(axis="x", which="both", length=0)
    slash = {"marker": [(-1, -0.6), (1, 0.6)], "ms": 8, "mew": 1, "color": "black"}
    large.plot([0], [0], transform=large.transAxes, ls="none", clip_on=False, **slash)
    tiny.plot([0], [1], transform=tiny.transAxes, ls="none", clip_on=False, **slash)
    large.set_yscale("log")
    tiny.set(yscale="log", ylim=(1e-15, 1e-8), yticks=[1e-14, 1e-9])
    tiny.axhline(1e-9, color=plots.GREY, linewidth=0.8, linestyle=":")
    figure.supylabel("distance to theory  ‖Λ̂ − Λ‖ / ‖Λ‖", fontsize=9)
    return large, tiny


def _draw_by_endpoints(axes: tuple[Any, Any], rows: Table) -> None:
    """Panel E: medians and ranges over pools, because single pools dominate the mean near m = p."""
    large, tiny = axes
    pairs = select(rows, "E", "pairs")
    for series, colour in COLOURS.items():
        pools = select(rows, "E", series).groupby("m").relative
        median = pools.median()
        for axis in axes:
            axis.plot(median.index, median, color=colour, label=f"{series}, median")
            axis.fill_between(median.index, pools.min(), pools.max(), color=colour, alpha=0.2, lw=0)
        if series == "pairs":
            large.plot(median.index, pools.mean(), ":", color=colour, lw=1, label="pairs, mean")
            shown = rows[(rows.series == "entry") & rows.m.notna()].groupby("panel").m.first()
            large.plot(shown, median[list(shown)], "o", color=colour, ms=5)
            for letter, m in shown.items():
                large.annotate(
                    str(letter), (m, median[m]), (0, 7), textcoords="offset points", ha="center",
                    color=colour, fontweight="bold",
                )  # fmt: skip
    _draw_baseline(large, rows)
    large.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    sigma = pairs.sigma.iloc[0]
    large.set(ylim=(0.2, 60), title=f"E   Against the number of endpoints, σ = {sigma:g}")
    large.annotate(
        "m ≈ p: heavy tails", (10, float(pairs.relative.max())), (8, -3),
        textcoords="offset points", fontsize=8, color=plots.BLUE,
    )  # fmt: skip
    joined = select(rows, "E", "joined").sort_values("m").iloc[-1]
    large.annotate(
        f"{joined.relative:.2f} at m = {joined.m:,.0f}", (1, 0.1), xycoords="axes fraction",
        ha="right", fontsize=8, color=plots.BLUE,
    )  # fmt: skip
    large.legend(loc="upper right", title="band: range over pools", title_fontsize=8)
    tiny.set_xlabel("endpoints m, including the one on the data set itself")
    tiny.annotate(
        "residual: exact from m = p = 10", (0.97, 0.62), xycoords="axes fraction", ha="right",
        fontsize=8, color=plots.ORANGE,
    )  # fmt: skip


def _draw_by_noise(axes: tuple[Any, Any], rows: Table) -> None:
    """Panel F: means and 95 % intervals over pools, and every further draw as a thin line."""
    large, tiny = axes
    draws = further_draws(rows)
    for k, (_, errors) in enumerate(draws.iterrows()):
        label = f"pairs, {len(draws)} other draws" if not k else None
        large.plot(draws.columns, errors, color=plots.GREY, alpha=0.35, lw=0.7, label=label)
    for series, colour in COLOURS.items():
        pools = select(rows, "F", series).groupby("sigma").relative
        mean, half_width = pools.mean(), STANDARD_ERRORS * pools.sem()
        for axis in axes:
            axis.plot(mean.index, mean, "o-", color=colour, ms=3.5, label=f"{series}, paper's draw")
            low = (mean - half_width).clip(lower=mean / 10)
            axis.fill_between(mean.index, low, mean + half_width, color=colour, alpha=0.2, lw=0)
    _draw_baseline(large, rows)
    _draw_crossovers(large, rows)
    size = select(rows, "F", "pairs").m.iloc[0]
    title = f"F   Against the noise of the data, m = {size:.0f}"
    large.set(xscale="log", ylim=(0.2, 100), title=title)
    large.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    tiny.set_xticks([0.5, 1, 2, 4, 6, 10, 20], ["0.5", "1", "2", "4", "6", "10", "20"])
    tiny.set_xticks([], minor=True)
    large.legend(loc="upper right", title="band: 95 % interval over pools", title_fontsize=8)
    tiny.set_xlabel("standard deviation σ of the noise")


def _draw_crossovers(axis: Any, rows: Table) -> None:
    """Mark the σ from which each draw is better than Λ̂ = 0: the paper's by a diamond."""
    paper, further = crossovers(rows)
    axis.plot(further, np.ones(len(further)), "|", color="black", ms=9, mew=0.8)
    axis.plot([paper], [1], "D", color=plots.BLUE, ms=6, mec="white", zorder=5)
    text = f"better than Λ̂ = 0 from σ ≈ {paper:.1f}"
    if further.notna().any():
        low, median, high = further.quantile([0, 0.5, 1])
        text += f"\nother draws: {low:.1f} to {high:.1f}, median {median:.1f}"
    axis.annotate(
        text, (paper, 1), (0.04, 0.1), textcoords="axes fraction", fontsize=8,
        arrowprops={"arrowstyle": "-", "color": plots.BLUE, "lw": 0.8},
    )  # fmt: skip


def _draw_baseline(axis: Any, rows: Table) -> None:
    norm = float(rows.baseline.dropna().iloc[0])
    axis.axhline(1, color="black", linestyle="--", linewidth=1, label=f"Λ̂ = 0  (‖Λ‖ = {norm:.4f})")
