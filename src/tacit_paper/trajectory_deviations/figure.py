"""Drawing of the trajectory figure, only from its rows."""

from typing import Any

from tacit_paper import Table, plots


def plot(rows: Table) -> "plots.Figure":
    """Both paths on the contours of the loss, with the deviation at every step."""
    surface, flow = rows[rows.unit == "ground"], rows[rows.unit == "flow"]
    sgd = rows[rows.unit == "minibatch"]
    with plots.style():
        figure = plots.new_figure(5.8, 4.4)
        axis: Any = figure.subplots()
        losses = surface.pivot_table(index="b", columns="w", values="loss")
        grey = {"levels": 18, "cmap": "Greys", "alpha": 0.55}
        contours = axis.contourf(losses.columns, losses.index, losses, **grey)
        figure.colorbar(contours, ax=axis, label="loss over all 96 points")
        axis.plot(flow.w, flow.b, color=plots.GREY, linewidth=2.5, label="gradient flow")
        last = sgd.iloc[-1]
        w, b = [*sgd.w, last.w + last.moved_w], [*sgd.b, last.b + last.moved_b]
        axis.plot(w, b, "o-", color="black", markersize=4, label="minibatch SGD, 6 steps")
        arrow = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.006, "zorder": 3}
        expected = arrow | {"color": plots.ORANGE, "label": "where −η∇L would go"}
        axis.quiver(sgd.w, sgd.b, sgd.expected_w, sgd.expected_b, **expected)
        deviation = arrow | {"color": plots.BLUE, "label": "deviation"}
        w, b = sgd.w + sgd.expected_w, sgd.b + sgd.expected_b
        axis.quiver(w, b, sgd.moved_w - sgd.expected_w, sgd.moved_b - sgd.expected_b, **deviation)
        axis.set(xlabel="weight w", ylabel="bias b")
        axis.legend(loc="upper right", frameon=True, framealpha=0.9)
        axis.grid(visible=False)
    return figure
