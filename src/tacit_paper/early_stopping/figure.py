"""Drawing of the early-stopping figure, only from its rows."""

from typing import TYPE_CHECKING, Any

from tacit_paper import Table, plots
from tacit_paper.early_stopping.checks import mean_over_pools

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULES = {
    "min_delta": (plots.BLUE, "o", "improvement > 0.001 (published)"),
    "text float32": (plots.ORANGE, "s", "any improvement, float32 (text)"),
    "text float64": (plots.GREY, "^", "any improvement, float64 (text)"),
}
"""Stopping rules of panel D: series, and its colour, marker and label."""


def plot(rows: Table) -> "Figure":
    """Panels A to E: matrices, errors against m, weights, and the scalar strength."""
    with plots.style():
        figure = plots.new_figure(11.5, 6.8)
        halves: Any = figure.subfigures(2, 1, height_ratios=(1, 1.05))
        top, bottom = halves
        theory, estimate, fixed = top.subplots(1, 3, width_ratios=(1, 1, 1.75))
        weights, variable, scalar = bottom.subplots(1, 3, width_ratios=(1.1, 1.2, 1.2))
        _draw_matrices(top, (theory, estimate), rows)
        _draw_fixed(fixed, _series(rows, "B"))
        _draw_weights(weights, _series(rows, "C"))
        _draw_variable(variable, _series(rows, "D"))
        _draw_scalar(scalar, _series(rows, "E"))
    return figure


def _series(rows: Table, panel: str) -> dict[str, Table]:
    """The rows of each series of a panel."""
    return dict(list(rows[rows.panel == panel].groupby("series")))


def _draw_matrices(figure: Any, axes: tuple[Any, Any], rows: Table) -> None:
    """The matrices of panels A and B on one colour scale."""
    tables = [_series(rows, "A")["theory matrix"], _series(rows, "B")["estimate matrix"]]
    matrices = [table.pivot(index="i", columns="j", values="value").to_numpy() for table in tables]
    limit = max(abs(matrix).max() for matrix in matrices)
    titles = ("A  Theory Λ(500)", "B  Estimate from m = 10")
    image = None
    for axis, matrix, title in zip(axes, matrices, titles, strict=True):
        image = axis.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set_title(title)
        axis.set_xticks([0, 4, 9], ["1", "5", "10"])
        axis.set_yticks([0, 4, 9], ["1", "5", "10"])
        axis.set_xlabel("weight")
        axis.grid(False)
    axes[0].set_ylabel("weight")
    bar = figure.colorbar(image, ax=list(axes), shrink=0.8, pad=0.02)
    bar.set_label("entry of Λ")


def _draw_fixed(axis: Any, series: dict[str, Table]) -> None:
    for name, colour, marker in (("float32", plots.ORANGE, "s"), ("float64", plots.BLUE, "o")):
        _draw_band(axis, mean_over_pools(series[name]), colour, marker, f"trained in {name}")
    axis.axvline(10, color=plots.GREY, linestyle="--", linewidth=1)
    axis.annotate(
        "m = p = 10:\nfull rank", (10, 3e-11), xytext=(8, 0), textcoords="offset points",
        va="center", color=plots.GREY, fontsize=8,
    )  # fmt: skip
    _label_endpoint_axes(axis, "B  All stopped at t = 500: exact from m = p", "relative error of Λ̂")
    axis.set_ylim(1e-15, 8)
    axis.legend(loc="lower left")


def _draw_weights(axis: Any, series: dict[str, Table]) -> None:
    styles = {
        "true": {"marker": "_", "s": 190, "color": plots.GREY, "label": "true coefficients"},
        "early-stopped": {
            "marker": "o", "s": 62, "facecolors": "none", "edgecolors": plots.BLUE,
            "linewidths": 1.5, "label": "stopped at t = 500",
        },
        "retrained": {
            "marker": "x", "s": 24, "color": plots.ORANGE, "linewidths": 1.5,
            "label": "retrained with diag(Λ̂), no stopping",
        },
    }  # fmt: skip
    for name, style in styles.items():
        axis.scatter(series[name].i + 1, series[name].value, **style)
    axis.axhline(0, color="black", linewidth=0.6)
    datasets = series["dataset"]
    negative = (datasets.least_entry < 0).sum()
    without_minimum = (datasets.least_eigenvalue <= 0).sum()
    axis.set_title("C  One endpoint, diagonal penalty")
    axis.set_xlabel(
        f"weight\nOf {len(datasets)} data sets, {negative} give a negative entry,\n"
        f"{without_minimum} a penalised loss without a minimum."
    )
    axis.set_ylabel("value")
    axis.set_xticks(range(1, len(series["true"]) + 1))
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.42 * (high - low))
    axis.legend(loc="upper left")


def _draw_variable(axis: Any, series: dict[str, Table]) -> None:
    for name, (colour, marker, label) in RULES.items():
        median = series[f"{name} stops"].t.median()
        _draw_band(
            axis, mean_over_pools(series[name]), colour, marker, f"{label}: t ≈ {median:.0f}"
        )
    _label_endpoint_axes(axis, "D  Each endpoint stops at its own step", "relative error of Λ̂")
    axis.set_ylim(1e-3, 40)
    axis.legend(loc="upper left")


def _draw_band(axis: Any, table: Table, colour: str, marker: str, label: str) -> None:
    low = table.low.clip(lower=table["mean"] / 100)
    axis.fill_between(table.index, low, table.high, color=colour, alpha=0.2, linewidth=0)
    axis.plot(table.index, table["mean"], color=colour, marker=marker, markersize=3.5, label=label)


def _label_endpoint_axes(axis: Any, title: str, label: str) -> None:
    axis.set_title(title)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
    axis.minorticks_off()
    axis.set_xlabel("endpoints m (line: mean over pools, band: 95 % CI)")
    axis.set_ylabel(label)


def _draw_scalar(axis: Any, series: dict[str, Table]) -> None:
    table = series["scalar"].sort_values("t")
    axis.plot(
        table.t, table["trace"], color=plots.GREY, linestyle="--", label="tr Λ(t)/p (published)"
    )
    axis.plot(
        table.t, table.rayleigh, color=plots.ORANGE, linewidth=4, alpha=0.5,
        label="Rayleigh quotient θᵀΛθ/θᵀθ",
    )  # fmt: skip
    axis.fill_between(
        table.t, table.low.clip(lower=1e-9), table.high, color=plots.BLUE, alpha=0.15, linewidth=0,
        label="95 % interval: other examples",
    )  # fmt: skip
    axis.plot(table.t, table.value, color=plots.BLUE, label="exact strength λ̂")
    axis.scatter(
        table.t, table.adam, s=26, facecolors="white", edgecolors=plots.BLUE, zorder=3,
        label="Adam's fit (published)",
    )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_title("E  One ridge strength over training")
    axis.set_xlabel("steps of gradient descent t")
    axis.set_ylabel("ridge strength")
    axis.set_ylim(2e-5, 8e3)
    axis.legend(loc="lower left")
    inset = axis.inset_axes((0.6, 0.64, 0.38, 0.27))
    inset.axhline(1, color=plots.GREY, linestyle="--")
    for column, colour, width in (("rayleigh", plots.ORANGE, 4), ("value", plots.BLUE, 1.5)):
        ratio = table[column] / table["trace"]
        inset.plot(table.t, ratio, color=colour, linewidth=width, alpha=0.5 if width > 2 else 1)
    inset.set_xscale("log")
    inset.set_xticks([1, 1000], ["1", "1000"])
    inset.set_yticks([0.8, 0.9, 1])
    inset.minorticks_off()
    inset.set_ylim(0.78, 1.03)
    inset.tick_params(labelsize=7)
    inset.set_title("ratio to tr Λ/p", fontsize=7.5, pad=2)
