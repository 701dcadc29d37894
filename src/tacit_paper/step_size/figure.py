"""The step-size figure, drawn from its rows."""

import math
from collections.abc import Iterator
from typing import Any

from tacit_paper import Table, plots
from tacit_paper.step_size.checks import (
    FITTED,
    select_least_squares,
    select_networks,
    select_trained,
)


def plot(rows: Table) -> "plots.Figure":
    """The three published panels, the ratio to theory, and the networks without an estimate."""
    trained = select_trained(rows)
    with plots.style():
        figure = plots.new_figure(10.5, 7.6)
        (gradients, accuracies), (strengths, ratios) = figure.subplots(2, 2)
        lines = list(_lines_by_width(trained))
        for label, colour, width in lines:
            style = {"color": colour, "marker": "o", "markersize": 4.5, "label": label}
            _plot_networks(gradients, width, width.r_ig, style)
            _plot_networks(accuracies, width, 100 * width.test_accuracy, style)
            strengths.plot(width.lambda_theory, width.lambda_hat, **{**style, "linestyle": "none"})
        gradients.set(title="A  Mean squared gradient", yscale="log")
        gradients.set_ylabel(r"$R_\mathrm{IG}$ = ‖∇L‖²/p")
        accuracies.set(title="B  Test accuracy", ylabel="test accuracy (%)")
        label = f"below {FITTED:.0%} on the training set".replace("%", " %")
        dot = {"color": "black", "marker": "o", "markersize": 4.5, "mfc": "white", "ls": "none"}
        (hollow,) = accuracies.plot([], [], label=label, **dot)
        accuracies.legend(handles=[hollow], loc="lower right")
        for axes in (gradients, accuracies):
            limits = _decades_around(trained.lambda_hat)
            axes.set(xscale="log", xlabel="estimated strength, λ̂", xlim=limits)
        _finish_strengths(strengths, trained)
        _plot_ratios(ratios, lines, select_least_squares(rows))
        for axes in (gradients, accuracies, strengths, ratios):
            # Below two decades matplotlib would label every minor tick, one over the other.
            axes.xaxis.set_minor_formatter("")
        names = gradients.get_legend_handles_labels()
        figure.legend(*names, loc="outside right upper", title="hidden layers")
        figure.supxlabel(describe_missing(rows), fontsize=8.5, color=plots.RED, x=0.01, ha="left")
    return figure


def _plot_networks(axes: Any, networks: Table, values: Table, style: dict[str, Any]) -> None:
    """A line through networks of one width; hollow where they do not fit the training set."""
    axes.plot(networks.lambda_hat, values, **style)
    hollow = {**style, "label": None, "linestyle": "none", "mfc": "white", "zorder": 3}
    unfitted = networks.train_accuracy < FITTED
    axes.plot(networks.lambda_hat[unfitted], values[unfitted], **hollow)


def _lines_by_width(trained: Table) -> Iterator[tuple[str, Any, Table]]:
    """Label, colour and rows of every width, narrow ones first, in the order of η."""
    import matplotlib as mpl

    widths = sorted(trained.width.unique())
    colours = mpl.colormaps["viridis"]
    for i, width in enumerate(widths):
        colour = colours(0.9 * i / max(1, len(widths) - 1))
        yield f"{width:.0f} wide", colour, trained[trained.width == width].sort_values("eta")


def _decades_around(values: Table) -> tuple[float, float]:
    """The powers of ten just below and just above all values."""
    low, high = math.log10(values.min() / 1.1), math.log10(values.max() * 1.1)
    return 10.0 ** math.floor(low), 10.0 ** math.ceil(high)


def _finish_strengths(axes: Any, trained: Table) -> None:
    """The diagonal, labels and legend of estimated against predicted strengths."""
    ends = [trained.lambda_theory.min() / 2, trained.lambda_theory.max() * 2]
    equal = axes.plot(ends, ends, "--", color="black", linewidth=1, label="equal", zorder=1)
    axes.set(title="C  Estimated against predicted", xscale="log", yscale="log")
    axes.set(xlabel="predicted strength, ηp/4", ylabel="estimated strength, λ̂")
    axes.legend(handles=equal, loc="upper left")


def _plot_ratios(axes: Any, lines: list[tuple[str, Any, Table]], least_squares: Table) -> None:
    """Estimated over predicted against η: open with one column, filled with two."""
    styles = (
        ("ratio_first", "--", "white", "only the column of ‖∇L‖²"),
        ("ratio_second", "-", None, "with the flow's next term"),
    )
    lines = [("least squares", plots.GREY, least_squares), *lines]
    style = {"linewidth": 1, "marker": "o", "markersize": 4.5}
    for column, dashes, face, label in styles:
        for _, colour, line in lines:
            axes.plot(line.eta, line[column], dashes, color=colour, mfc=face or colour, **style)
        axes.plot([], [], dashes, color="black", mfc=face or "black", label=label, **style)
    axes.plot([], [], color=plots.GREY, marker="o", markersize=4.5, label="least squares")
    axes.axhline(1, color="black", linewidth=1, zorder=1)
    lowest = min(line.ratio_first.min() for _, _, line in lines)
    axes.set(title="D  Ratio, with one term and with two", xscale="log", xlabel="step size η")
    axes.set(ylabel="estimated / predicted", ylim=(min(0.75, lowest - 0.12), 1.02))
    axes.legend(loc="lower left")


def describe_missing(rows: Table) -> str:
    """A sentence that names the networks without an estimate, by step size."""
    networks = select_networks(rows)
    failed = networks[~networks.trained.astype(bool)]
    if not len(failed):
        return "All networks reached 90 % on the training set."
    parts = []
    for eta, group in failed.groupby("eta"):
        widths = [f"{width:.0f}" for width in sorted(group.width)]
        all_failed = len(group) == (networks.eta == eta).sum()
        diverged = group.reason.str.startswith("diverged").all()
        names = "all widths" if all_failed else f"width {', '.join(widths)}"
        parts.append(f"η = {eta:g}: {names}{' (diverged)' if diverged else ''}")
    return (
        f"No estimate, because training accuracy stayed below 90 %: {len(failed)} of "
        f"{len(networks)} networks.  {';  '.join(parts)}."
    )
