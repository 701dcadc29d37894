"""Drawing of the averaging figure, only from its rows."""

from typing import Any

import numpy as np

from tacit_paper import Table, plots
from tacit_paper.averaging.checks import scaled_strengths, select

COLOURS = {"mean": plots.BLUE, "last": plots.ORANGE}
NAMES = {"mean": "mean of the iterates", "last": "last iterate"}
PENALTIES = {
    "pull to the start": "pull to\nthe start",
    "ridge": "ridge",
    "none": "no penalty",
}


def plot(rows: Table) -> "plots.Figure":
    """Least squares by direction; strengths, explained fractions and retraining of networks."""
    directions, networks, retrained = select(rows)
    with plots.style():
        figure = plots.new_figure(10, 7)
        (law, strengths), (explained, distances) = figure.subplots(2, 2)
        _draw_law(law, directions)
        _draw_strengths(strengths, networks)
        _draw_explained(explained, networks)
        _draw_distances(distances, retrained)
    return figure


def _draw_law(axis: Any, directions: Table) -> None:
    """Strength of each direction against its curvature, both in units of the time ηt."""
    x = np.geomspace(1e-3, 1e3, 200)
    last = np.where(x < 20, x / np.expm1(np.minimum(x, 20)), np.nan)
    decayed = -np.expm1(-x) / x
    theory = {"mean": x * decayed / (1 - decayed), "last": last}
    axis.axhspan(1, 2, color=plots.BLUE, alpha=0.12, linewidth=0)
    for kind, colour in COLOURS.items():
        points = directions[directions.kind == kind]
        scaled = scaled_strengths(points, "strength")
        axis.plot(x, theory[kind], color=colour, linewidth=1)
        axis.plot(points.curvature * points.time, scaled, "o", color=colour, label=NAMES[kind])
    axis.set(xscale="log", yscale="log", ylim=(1e-3, 4), xlim=(3e-4, 1e3))
    axis.set(title="A  Least squares: each direction", xlabel="curvature × ηt")
    axis.set_ylabel("estimated strength × 2ηt")
    axis.legend(loc="lower left")


def _draw_strengths(axis: Any, networks: Table) -> None:
    """Strengths in networks, with the range of their layers."""
    axis.axhspan(1, 2, color=plots.BLUE, alpha=0.12, linewidth=0)
    mean = networks[networks.kind == "mean"]
    for shift, (kind, colour) in zip((0.96, 1.04), COLOURS.items(), strict=True):
        points = networks[networks.kind == kind]
        scaled = scaled_strengths(points, "strength_start")
        axis.plot(points.epochs * shift, scaled, "o", color=colour, markersize=5, label=NAMES[kind])
    low = scaled_strengths(mean, "lowest_layer").groupby(mean.epochs).median()
    high = scaled_strengths(mean, "highest_layer").groupby(mean.epochs).median()
    label = "range of the layers (median)"
    axis.vlines(low.index * 0.9, low, high, color=plots.BLUE, linewidth=1.5, label=label)
    _label_epochs(axis, networks)
    axis.set(ylim=(0, 2.9), ylabel="estimated strength × 2ηt")
    axis.set_title("B  Networks: pull to the start of averaging")
    axis.legend(loc="upper right")


def _draw_explained(axis: Any, networks: Table) -> None:
    """What the pull and ridge explain, at the mean and at the last weights."""
    styles = {"explained_start": ("-", "pull"), "explained_ridge": ("--", "ridge")}
    for kind, colour in COLOURS.items():
        points = networks[networks.kind == kind]
        for column, (dashes, name) in styles.items():
            grouped = points.groupby("epochs")[column]
            middle, low, high = grouped.median(), grouped.min(), grouped.max()
            axis.fill_between(middle.index, low, high, color=colour, alpha=0.12, linewidth=0)
            label = f"{name}, {NAMES[kind]}"
            axis.plot(middle, dashes, color=colour, marker="o", markersize=4, label=label)
    _label_epochs(axis, networks)
    axis.set(ylim=(0, 1.35), ylabel="explained fraction of −∇L")
    axis.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axis.set_title("C  Networks: what is explained")
    axis.legend(loc="upper center", ncols=2, fontsize=8)


def _draw_distances(axis: Any, retrained: Table) -> None:
    """How far from the averaged weights retrained networks end."""
    for k, penalty in enumerate(PENALTIES):
        points = retrained[retrained.penalty == penalty]
        colour = plots.BLUE if k == 0 else plots.GREY
        offsets = np.linspace(-0.15, 0.15, len(points))
        axis.plot(k + offsets, points.distance, "o", color=colour, markersize=5)
        middle = points.distance.median()
        axis.text(k + 0.24, middle, f"{middle:.2g}", va="center", color=colour)
    axis.axhline(1, color="black", linestyle=":", linewidth=1)
    axis.text(2.45, 1.03, "as far as the start is", ha="right", va="bottom", color=plots.GREY)
    axis.set(yscale="log", xlim=(-0.5, 2.5), ylabel="distance to the averaged weights")
    axis.yaxis.set_minor_formatter("")
    axis.set_xticks(range(len(PENALTIES)), list(PENALTIES.values()))
    axis.set_title("D  Networks minimised again, with")


def _label_epochs(axis: Any, networks: Table) -> None:
    epochs = sorted(networks.epochs.unique())
    axis.set_xscale("log")
    axis.set_xticks(epochs, [f"{count:g}" for count in epochs])
    axis.xaxis.set_minor_formatter("")
    axis.minorticks_off()
    axis.set_xlabel("averaged epochs")
