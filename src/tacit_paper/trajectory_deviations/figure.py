"""Drawing of the trajectory figure, only from its rows."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.trajectory_deviations.checks import explained_parts

COLOURS = {
    "ridge": plots.RED,
    "‖∇L‖²": plots.BLUE,
    "‖∇L‖², variance of ∇L": plots.GREEN,
}


def plot(rows: Table) -> "plots.Figure":
    """Both paths with the deviation at every step, and what penalties explain of it."""
    with plots.style():
        figure = plots.new_figure(10.5, 4.4)
        left, right = figure.subplots(1, 2, width_ratios=[1.35, 1])
        _draw_paths(figure, left, rows)
        _draw_explained(right, rows)
    return figure


def _draw_paths(figure: Any, axis: Any, rows: Table) -> None:
    surface, flow = rows[rows.unit == "ground"], rows[rows.unit == "flow"]
    sgd = rows[rows.unit == "minibatch"]
    losses = surface.pivot_table(index="b", columns="w", values="loss")
    grey = {"levels": 18, "cmap": "Greys", "alpha": 0.55}
    contours = axis.contourf(losses.columns, losses.index, losses, **grey)
    figure.colorbar(contours, ax=axis, label="loss over all 96 points", format="%.1f")
    axis.plot(flow.w, flow.b, color=plots.GREY, linewidth=2.5, label="gradient flow")
    last = sgd.iloc[-1]
    w, b = [*sgd.w, last.w + last.moved_w], [*sgd.b, last.b + last.moved_b]
    label = f"minibatch SGD, {len(sgd)} steps"
    axis.plot(w, b, "o-", color="black", markersize=4, label=label)
    arrow = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.006, "zorder": 3}
    expected = arrow | {"color": plots.ORANGE, "label": "where −η∇L would go"}
    axis.quiver(sgd.w, sgd.b, sgd.expected_w, sgd.expected_b, **expected)
    deviation = arrow | {"color": plots.BLUE, "label": "deviation"}
    middle_w, middle_b = sgd.w + sgd.expected_w, sgd.b + sgd.expected_b
    moved_w, moved_b = sgd.moved_w - sgd.expected_w, sgd.moved_b - sgd.expected_b
    axis.quiver(middle_w, middle_b, moved_w, moved_b, **deviation)
    _mark(axis, (w[0], b[0]), "start of both", "D", (0, 14), "center")
    _mark(axis, (flow.w.iloc[-1], flow.b.iloc[-1]), "end of the flow", "s", (0, -16), "center")
    _mark(axis, (w[-1], b[-1]), "end of SGD", "s", (12, 4), "left")
    axis.set(title="A  Two paths on the loss", xlabel="weight w", ylabel="bias b")
    axis.set(xlim=(-0.7, 1.25), ylim=(-0.55, 1.25))
    axis.legend(loc="upper right", frameon=True, framealpha=0.9)
    axis.grid(visible=False)


def _mark(axis: Any, point: Any, label: str, marker: str, offset: Any, side: str) -> None:
    """A white marker at a point, with its name beside it."""
    axis.plot(*point, marker, color="black", mfc="white", markersize=7, zorder=5)
    axis.annotate(label, point, offset, textcoords="offset points", ha=side, va="center", zorder=6)


def _draw_explained(axis: Any, rows: Table) -> None:
    """Explained fractions of the steps shown, of all draws of their batches, and of epochs."""
    redrawn, epochs = explained_parts(rows)
    draws = f"{redrawn.draws.max():,.0f}"
    groups = {
        "the six steps\nshown in A": redrawn.explained,
        f"{draws} draws of\ntheir batches,\none strength": redrawn.together,
        "mean of\nshuffled epochs,\nagainst the flow": epochs.explained,
    }
    for group, values in enumerate(groups.values()):
        for k, (name, colour) in enumerate(COLOURS.items()):
            y = group + 0.25 * (k - 1)
            if group == 0:
                low, high = redrawn.low[name], redrawn.high[name]
                label = "95 % of single draws" if k == 0 else None
                axis.barh(y, high - low, 0.14, left=low, color="#d0d0d0", label=label, zorder=1)
            label = name if group == 0 else None
            axis.plot(values[name], y, "o", color=colour, markersize=7, label=label, clip_on=False)
    axis.set(xlim=(-0.02, 1.02), ylim=(2.6, -0.6), xlabel="explained fraction of the deviation")
    axis.set_yticks(range(len(groups)), list(groups))
    axis.set_title("B  What penalties explain")
    axis.legend(loc="center right", bbox_to_anchor=(1.0, 0.42), frameon=True, framealpha=0.9)
