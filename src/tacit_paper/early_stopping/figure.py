"""Drawing of the early-stopping figure, only from its rows."""

from collections.abc import Sequence
from typing import Any

from tacit_paper import Table, plots
from tacit_paper.early_stopping.checks import mean_over_pools

RULES = (
    ("min_delta", plots.BLUE, "o", "improvement > 0.001 (published)"),
    ("text float32", plots.ORANGE, "s", "any improvement, float32 (text)"),
    ("text float64", plots.GREY, "^", "any improvement, float64 (text)"),
)
"""Stopping rules of panel D: series, colour, marker and label."""


def plot(rows: Table) -> "plots.Figure":
    """Panels A to E as in the paper; B′ and C′ add the error against m and the diagonals."""
    series = {panel: dict(list(table.groupby("series"))) for panel, table in rows.groupby("panel")}
    with plots.style():
        figure = plots.new_figure(9.6, 9.9)
        parts: Any = figure.subfigures(3, 1, height_ratios=(1, 1, 1.15))
        top, middle, bottom = parts
        theory, estimate, fixed = top.subplots(1, 3, width_ratios=(1, 1, 1.75))
        weights, diagonals = middle.subplots(1, 2)
        variable, scalar = bottom.subplots(1, 2)
        matrices = (series["A"]["theory matrix"], series["B"]["estimate matrix"])
        _draw_matrices(top, (theory, estimate), matrices)
        _draw_fixed(fixed, series["B"])
        _draw_weights(weights, series["C"])
        _draw_diagonals(diagonals, series["C"])
        _draw_variable(variable, series["D"])
        _draw_scalar(scalar, series["E"]["scalar"].sort_values("t").set_index("t"))
    return figure


def _draw_matrices(figure: Any, axes: Sequence[Any], tables: Sequence[Table]) -> None:
    """The matrices of panels A and B on one colour scale."""
    matrices = [table.pivot(index="i", columns="j", values="value").to_numpy() for table in tables]
    limit = max(abs(matrix).max() for matrix in matrices)
    titles = ("A  Theory Λ(500)", "B  Estimate, m = 10")
    for axis, matrix, title in zip(axes, matrices, titles, strict=True):
        axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set(title=title, xlabel="weight")
        axis.set_xticks([0, 4, 9], ["1", "5", "10"])
        axis.set_yticks([0, 4, 9], ["1", "5", "10"])
        axis.grid(False)
    axes[0].set_ylabel("weight")
    figure.colorbar(axes[0].images[0], ax=axes, shrink=0.8, pad=0.02, label="entry of Λ")


def _draw_fixed(axis: Any, series: dict[str, Table]) -> None:
    for name, colour, marker in (("float32", plots.ORANGE, "s"), ("float64", plots.BLUE, "o")):
        _draw_errors(axis, series[name], colour, marker, f"trained in {name}")
    axis.axvline(10, color=plots.GREY, linestyle="--", linewidth=1)
    axis.annotate(
        "m = p = 10:\nfull rank", (10, 3e-11), xytext=(8, 0), textcoords="offset points",
        va="center", color=plots.GREY, fontsize=8,
    )  # fmt: skip
    axis.set(title="B′  All stop at t = 500: exact from m = p", ylim=(1e-15, 8))
    axis.legend(loc="lower left")


def _draw_variable(axis: Any, series: dict[str, Table]) -> None:
    for name, colour, marker, label in RULES:
        label = f"{label}: t ≈ {series[f'{name} stops'].t.median():.0f}"
        _draw_errors(axis, series[name], colour, marker, label)
    axis.set(title="D  Each endpoint stops at its own step", ylim=(1e-3, 40))
    axis.legend(loc="upper left")


def _draw_errors(axis: Any, rows: Table, colour: str, marker: str, label: str) -> None:
    """Mean error over pools against the number of endpoints, with its interval as a band."""
    table = mean_over_pools(rows)
    low = table.low.clip(lower=table["mean"] / 100)
    axis.fill_between(table.index, low, table.high, color=colour, alpha=0.2, linewidth=0)
    axis.plot(table["mean"], color=colour, marker=marker, markersize=3.5, label=label)
    axis.set(xscale="log", yscale="log", ylabel="relative error of Λ̂")
    axis.set_xlabel("endpoints m (line: mean over pools, band: 95 % CI)")
    ticks = [1, 2, 5, 10, 20, 50, 100]
    axis.set_xticks(ticks, map(str, ticks))
    axis.minorticks_off()


def _draw_weights(axis: Any, series: dict[str, Table]) -> None:
    styles = {
        "true": {"marker": "_", "s": 190, "color": plots.GREY},
        "early-stopped": {"s": 62, "facecolors": "none", "edgecolors": plots.BLUE, "lw": 1.5},
        "retrained": {"marker": "x", "s": 24, "color": plots.ORANGE},
    }
    labels = ("true coefficients", "stopped at t = 500", "retrained with diag(Λ̂), no stopping")
    for (name, style), label in zip(styles.items(), labels, strict=True):
        axis.scatter(series[name].i + 1, series[name].value, label=label, **style)
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set(title="C  One endpoint, diagonal penalty: same weights", ylabel="weight")
    axis.set_xlabel("index of the weight")
    _finish_diagonal_panel(axis, len(series["true"]))


def _draw_diagonals(axis: Any, series: dict[str, Table]) -> None:
    """diag(Λ̂) from the same endpoint beside the diagonal of the exact Λ."""
    styles = {
        "theory": {"marker": "_", "s": 190, "color": plots.GREY, "label": "diag Λ(500), theory"},
        "estimate": {"s": 36, "color": plots.ORANGE, "label": "diag(Λ̂), one endpoint"},
    }
    for name, style in styles.items():
        axis.scatter(series[name].i + 1, series[name].value, **style)
    axis.axhline(0, color="black", linewidth=0.6)
    datasets = series["dataset"]
    negative = (datasets.least_entry < 0).sum()
    without_minimum = (datasets.least_eigenvalue <= 0).sum()
    axis.set(title="C′  The same penalty: not the diagonal of Λ", ylabel="entry of the diagonal")
    axis.set_xlabel(
        f"index of the weight\n{len(datasets)} data sets: {negative} with a negative entry, "
        f"{without_minimum} without a minimum"
    )
    _finish_diagonal_panel(axis, len(series["theory"]))


def _finish_diagonal_panel(axis: Any, weights: int) -> None:
    """Ticks of single weights, and room above for the legend."""
    axis.set_xticks(range(1, weights + 1))
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.42 * (high - low))
    axis.legend(loc="upper left")


def _draw_scalar(axis: Any, table: Table) -> None:
    trace, rayleigh, exact = table["trace"], table.rayleigh, table.value
    wide = {"color": plots.ORANGE, "linewidth": 4, "alpha": 0.5}
    band = {"color": plots.BLUE, "linewidth": 0, "alpha": 0.15}
    low = table.low.clip(lower=1e-9)
    axis.plot(trace, "--", color=plots.GREY, label="tr Λ(t)/p (published)")
    axis.plot(rayleigh, label="Rayleigh quotient θᵀΛθ/θᵀθ", **wide)
    axis.fill_between(table.index, low, table.high, label="95 % interval: other examples", **band)
    axis.plot(exact, color=plots.BLUE, label="exact strength λ̂")
    dots = {"s": 26, "facecolors": "white", "edgecolors": plots.BLUE, "zorder": 3}
    axis.scatter(table.index, table.adam, label="Adam's fit (published)", **dots)
    axis.set(title="E  One ridge strength over training", xscale="log", yscale="log")
    axis.set(xlabel="steps of gradient descent t", ylabel="ridge strength", ylim=(2e-5, 8e3))
    axis.legend(loc="lower left")
    inset = axis.inset_axes((0.6, 0.64, 0.38, 0.27))
    inset.axhline(1, color=plots.GREY, linestyle="--")
    inset.plot(rayleigh / trace, **wide)
    inset.plot(exact / trace, color=plots.BLUE)
    inset.set(xscale="log", ylim=(0.78, 1.03), yticks=[0.8, 0.9, 1])
    inset.set_xticks([1, 1000], ["1", "1000"])
    inset.minorticks_off()
    inset.tick_params(labelsize=7)
    inset.set_title("ratio to tr Λ/p", fontsize=7.5, pad=2)
