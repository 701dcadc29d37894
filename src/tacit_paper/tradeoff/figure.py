"""Drawing of the trade-off figure, only from its rows."""

from typing import Any

from tacit_paper import Row, Table, plots


def plot(rows: Table) -> "plots.Figure":
    """Three curves, and the two gradients as arrows."""
    curves = rows[rows.unit == "curves"].set_index("theta")
    (optimum,) = rows[rows.unit == "estimate"].to_dict("records")
    total, strength = curves.loss + curves.penalty, f"{optimum['strength']:g}"
    top = float(total.max())
    with plots.style():
        figure = plots.new_figure(5.6, 3.7)
        axis = figure.subplots()
        axis.plot(curves.loss, color=plots.RED, label="loss L (mean squared error)")
        axis.plot(curves.penalty, color=plots.BLUE, label=f"penalty R = {strength} θ²")
        axis.plot(total, color="black", label="L + R")
        _draw_gradients(axis, optimum)
        axis.axvline(optimum["theta"], color=plots.GREY, linestyle=":", linewidth=1)
        axis.axvline(optimum["minimum"], color=plots.GREY, linestyle="--", linewidth=1)
        axis.text(optimum["theta"], top, " ridge\n optimum", va="top", ha="right", color=plots.GREY)
        axis.text(optimum["minimum"], top, " minimum of\n the loss", va="top", color=plots.GREY)
        axis.set(xlabel="weight θ", ylabel="objective", ylim=(0, top * 1.02))
        axis.set_title(
            f"At the ridge optimum two gradients balance: λ̂ = {optimum['estimated']:.3f} of "
            f"{strength} applied"
        )
        axis.legend(loc="center left", bbox_to_anchor=(0.0, 0.72))
    return figure


def _draw_gradients(axis: Any, optimum: Row) -> None:
    """The optimum as a dot, and from it −∇L and −∇R as arrows."""
    height = optimum["loss"] + optimum["penalty"]
    axis.plot(optimum["theta"], height, "o", color="black", markersize=5, zorder=4)
    background = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1}
    for term, letter, color, alignment in (
        ("loss", "L", plots.RED, "left"),
        ("penalty", "R", plots.BLUE, "right"),
    ):
        descent = -optimum[f"{term}_gradient"]
        tip = (optimum["theta"] + 0.6 * descent, height)
        arrow = {"arrowstyle": "-|>", "color": color, "lw": 2.5, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", tip, (optimum["theta"], height), arrowprops=arrow, zorder=3)
        label = f" −∇{letter} = {descent:+.3f} ".replace("-", "−")
        axis.text(
            *tip, label, color=color, ha=alignment, va="center", fontweight="bold", bbox=background
        )
