"""The long-horizon figure, drawn from its rows."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.long_horizon.checks import final_ratios

CASE_TITLES = {"least squares": "Least squares", "tanh": "tanh network", "ReLU": "ReLU network"}


def plot(rows: Table) -> "plots.Figure":
    """Both distances against the number of steps, one panel per case."""
    units = sorted(dict.fromkeys(rows.unit), key=lambda unit: unit == "ReLU")
    with plots.style():
        figure = plots.new_figure(3 * len(units), 3.3)
        panels: Any = figure.subplots(1, len(units), squeeze=False)[0]
        for letter, axes, unit in zip("ABCDEFGH", panels, units, strict=False):
            _plot_case(axes, rows[rows.unit == unit].sort_values("step"))
            axes.set_title(f"{letter}  {axes.get_title(loc='left')}")
        panels[0].set_ylabel("distance of descent from …")
        names = panels[0].get_legend_handles_labels()
        figure.legend(*names, loc="outside upper center", ncols=2)
    return figure


def _plot_case(axes: Any, rows: Table) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.plot(rows.step, rows.plain, color=plots.ORANGE, label="… the flow of L")
    axes.plot(rows.step, rows.modified, color=plots.BLUE, label="… the flow of L + (η/4)‖∇L‖²")
    highest, (case, eta) = rows[["plain", "modified"]].max().max(), rows[["case", "eta"]].iloc[0]
    axes.set_yscale("log")
    # At least a factor of 100, so that two lines which nearly agree look as if they do.
    axes.set_ylim(min(rows.modified.min() / 2, highest / 100), highest * 3)
    axes.yaxis.set_minor_formatter("")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    (ratio,) = final_ratios(rows).values()
    axes.set_xlabel(f"steps of gradient descent\nblue / orange at the end: {ratio:.2g}")
    axes.set_title(f"{CASE_TITLES[case]}, η = {eta:g}")
    if case == "ReLU":
        axes.text(0.05, 0.05, "outside the theory", color=plots.GREY, transform=axes.transAxes)
