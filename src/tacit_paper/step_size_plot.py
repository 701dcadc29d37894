"""The picture of `step_size`, from its rows alone."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tacit_paper import Table, plots
from tacit_paper.step_size_check import cells, least_squares, trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(rows: Table) -> "Figure":
    """The three published panels, the ratio to theory, and the networks that are missing."""
    found = trained(rows)
    with plots.style():
        figure = plots.new_figure(10.5, 7.6)
        (left, middle), (right, ratio) = figure.subplots(2, 2)
        lines = list(_by_width(found))
        for label, colour, part in lines:
            look = {"color": colour, "marker": "o", "markersize": 4.5, "label": label}
            left.plot(part.lambda_hat, part.r_ig, **look)
            middle.plot(part.lambda_hat, 100 * part.test_accuracy, **look)
            right.plot(part.lambda_theory, part.lambda_hat, **{**look, "linestyle": "none"})
        left.set(xscale="log", yscale="log", ylabel=r"$R_\mathrm{IG}$ = ‖∇L‖²/p")
        middle.set(xscale="log", ylabel="test accuracy (%)")
        left.set_title("A  Mean squared gradient")
        middle.set_title("B  Test accuracy")
        for axis in (left, middle):
            axis.set_xlabel("strength found, λ̂")
            axis.set_xlim(_decades(found.lambda_hat))
        _recovered(right, found)
        _ratio(ratio, lines, least_squares(rows))
        for axis in (left, middle, right, ratio):
            # Under two decades matplotlib would label every minor tick, one over the other.
            axis.xaxis.set_minor_formatter("")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", title="hidden layers")
        figure.supxlabel(missing(rows), fontsize=8.5, color=plots.RED, x=0.01, ha="left")
    return figure


def _by_width(found: Table) -> Iterator[tuple[str, Any, Table]]:
    """Label, colour and rows of every width, narrow ones first, in the order of η."""
    import matplotlib as mpl

    widths = sorted(found.width.unique())
    shades = mpl.colormaps["viridis"]
    for i, width in enumerate(widths):
        colour = shades(0.9 * i / max(1, len(widths) - 1))
        yield f"{width:.0f} wide", colour, found[found.width == width].sort_values("eta")


def _decades(values: Table) -> tuple[float, float]:
    """Powers of ten around all values."""
    return (
        10.0 ** math.floor(math.log10(values.min() / 1.1)),
        10.0 ** math.ceil(math.log10(values.max() * 1.1)),
    )


def _recovered(axis: Any, found: Table) -> None:
    ends = [found.lambda_theory.min() / 2, found.lambda_theory.max() * 2]
    axis.plot(ends, ends, color="black", linestyle="--", linewidth=1, label="equal", zorder=1)
    axis.set(xscale="log", yscale="log", xlabel="strength predicted, ηp/4")
    axis.set_ylabel("strength found, λ̂")
    axis.set_title("C  Found against predicted")
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[-1:], labels[-1:], loc="upper left")


def _ratio(axis: Any, lines: list[tuple[str, Any, Table]], plain: Table) -> None:
    """Found over predicted against η: open with one column, filled with two."""
    styles = (
        ("ratio_first", "--", "white", "column of ‖∇L‖² alone"),
        ("ratio_second", "-", None, "with the flow's next term"),
    )
    every = [("least squares", plots.GREY, plain), *lines]
    for column, dashes, face, label in styles:
        for _, colour, part in every:
            axis.plot(
                part.eta, part[column], color=colour, linestyle=dashes, linewidth=1,
                marker="o", markersize=4.5, markerfacecolor=face or colour,
            )  # fmt: skip
        axis.plot(
            [], [], color="black", linestyle=dashes, linewidth=1, marker="o", markersize=4.5,
            markerfacecolor=face or "black", label=label,
        )  # fmt: skip
    axis.plot([], [], color=plots.GREY, marker="o", markersize=4.5, label="least squares")
    axis.axhline(1, color="black", linewidth=1, zorder=1)
    lowest = min(part.ratio_first.min() for _, _, part in every)
    axis.set(xscale="log", xlabel="step size η", ylabel="found / predicted")
    axis.set_ylim(min(0.75, lowest - 0.12), 1.02)
    axis.set_title("D  Ratio, by the first term and by two")
    axis.legend(loc="lower left")


def missing(rows: Table) -> str:
    """The networks that have no estimate, by step size."""
    every = cells(rows)
    failed = every[~every.trained.astype(bool)]
    if not len(failed):
        return "All networks reached 90 % on the training set."
    parts = []
    for eta, group in failed.groupby("eta"):
        widths = [f"{width:.0f}" for width in sorted(group.width)]
        whole = len(group) == (every.eta == eta).sum()
        diverged = group.reason.str.startswith("diverged").all()
        named = "all widths" if whole else f"width {', '.join(widths)}"
        parts.append(f"η = {eta:g}: {named}{' (diverged)' if diverged else ''}")
    return (
        f"No estimate, for never reaching 90 % on the training set: {len(failed)} of {len(every)} "
        f"networks.  {';  '.join(parts)}."
    )
