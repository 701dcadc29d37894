"""The discovery figure, drawn from rows."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.discovery.panels import BETA

TITLES = {
    "elastic net": "(a) ridge and smooth L1",
    "diagonal network": "(b) a diagonal linear network",
    "AdamW": "(c) AdamW",
    "power law": "(d) a power law",
}


def plot(rows: Table) -> "plots.Figure":
    """Four panels of s′: the law, and the curve that was found, with its band."""
    with plots.style():
        figure = plots.new_figure(8.6, 6.2)
        panels: Any = figure.subplots(2, 2)
        for axes, (name, title) in zip(panels.flat, TITLES.items(), strict=True):
            _draw_panel(axes, rows[rows.panel == name], log=name == "power law")
            axes.set_title(title)
        for x in (-BETA, BETA):
            panels[0, 0].axvline(x, color=plots.GREY, ls=":", lw=1)
        exponent = rows[rows.panel == "power law"].exponent.iloc[0]
        ridge = rows[rows.panel == "diagonal network"].ridge.iloc[0]
        _note(panels[1, 1], f"exponent p = {exponent:.3f}\n(1.5 applied)")
        _note(panels[0, 1], f"ridge explains {ridge:.0%}")
        _note(panels[0, 0], "kinks at ±β")
        panels[0, 0].legend(loc="lower right")
    return figure


def _draw_panel(axes: Any, rows: Table, *, log: bool) -> None:
    curve, weights = rows[rows.kind == "curve"], rows[rows.kind == "weight"].x
    sides = [curve[curve.x > 0]] if log else [curve[curve.x < 0], curve[curve.x > 0]]
    continuous = not log and _is_continuous(curve)
    for side in [curve] if continuous else sides:
        label = "the law" if side is curve or side is sides[0] else None
        axes.plot(side.x, side.law, color=plots.GREY, lw=5, alpha=0.45, label=label)
        axes.fill_between(side.x, side.low, side.high, color=plots.BLUE, alpha=0.3, lw=0)
        found = "spline, 95 % band" if label else None
        axes.plot(side.x, side.derivative, color=plots.BLUE, lw=1.3, label=found)
        knots = side[side.knot]
        axes.plot(knots.x, knots.derivative, ".", color=plots.BLUE, ms=4)
    if log:  # from the second knot on: below it there is one weight
        start = sorted(curve.x[curve.knot & (curve.x > 0)])[1]
        shown = curve[curve.x >= start]
        axes.set(xscale="log", yscale="log", xlim=(start / 1.2, 1.2 * shown.x.max()))
        axes.set_ylim(shown.law.min() / 1.4, 1.4 * shown.law.max())
        weights = weights[weights > start]
    axes.plot(
        weights, [0.015] * len(weights), "|", color="black", alpha=0.35, ms=7, mew=0.6,
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    axes.set(xlabel="weight", ylabel="s′")
    if not log:  # bands are infinite where one replicate alone has weights
        largest = 1.3 * float(curve.law.abs().max())
        axes.set_ylim(-largest, largest)


def _is_continuous(curve: Table) -> bool:
    """Whether the grid has zero, or points close to it: an even spline has none below its knots."""
    return bool(curve.x.abs().min() < 0.2 * curve.x.diff().max() or (curve.x == 0).any())


def _note(axes: Any, text: str) -> None:
    axes.text(0.04, 0.95, text, transform=axes.transAxes, va="top", size=8)
