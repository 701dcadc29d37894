"""The screening figure, drawn from rows."""

from typing import Any

from tacit_paper import Table, plots
from tacit_paper.screening.checks import CLAIMS, right_parts, select
from tacit_paper.screening.networks import PENALISED, WITHOUT

COLORS = {"answer": plots.BLUE, "aligned": plots.ORANGE}
LABELS = {"answer": "called the answer", "aligned": "called aligned, not the answer"}
JITTER = 0.22
"""Half the height that the networks of a kind are spread over."""
SHORT = {"converged": "no penalty: converged", "no effect": "no penalty: no effect"}


def plot(rows: Table) -> "plots.Figure":
    """What screens choose for every kind of network, above how often methods pick falsely."""
    with plots.style():
        figure = plots.new_figure(8.6, 8.2)
        panels: Any = figure.subplots(2, 1, height_ratios=(5, 1.5))
        _draw_networks(panels[0], rows)
        _draw_simulation(panels[1], select(rows, "simulation"))
    return figure


def _draw_networks(axes: Any, rows: Table) -> None:
    networks, names = select(rows, "network"), [*PENALISED, *WITHOUT]
    right = right_parts(rows)
    for place, name in enumerate(names):
        members = networks[networks.network == name]
        for number, row in enumerate(members.itertuples()):
            offset = JITTER * (2 * (number + 0.5) / len(members) - 1) if len(members) > 1 else 0
            _draw_network(axes, row, place + offset)
        if name in right.index:
            text = f"{right[name] * len(members):.0f} of {len(members)} right"
        else:
            claims = members.verdict.isin(CLAIMS).sum()
            text = f"{claims} of {len(members)} claims"
            if name == "stopped early":
                text = f"{(members.verdict == 'answer').sum()} of {len(members)} answers"
        axes.text(1.02, place, text, va="center", transform=axes.get_yaxis_transform(), size=8)
    labels = [SHORT.get(name, name) for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.axhline(len(PENALISED) - 0.5, color="black", lw=0.8)
    axes.set(
        xlim=(-0.03, 1.03),
        ylim=(len(names) - 0.5, -0.5),
        xlabel="part explained by what the screen chose",
    )
    for verdict, color in COLORS.items():
        axes.plot([], [], "o", color=color, label=LABELS[verdict])
    axes.plot([], [], "x", color=plots.GREY, label="nothing claimed")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, 1.1), ncols=3)


def _draw_network(axes: Any, row: Any, place: float) -> None:
    if row.verdict in COLORS:
        wrong = {"mec": plots.RED, "mew": 1.5} if row.truth and not row.right else {}
        axes.plot(row.explained, place, "o", color=COLORS[row.verdict], ms=5, alpha=0.85, **wrong)
    else:
        axes.plot(0, place, "x", color=plots.GREY, ms=5)


def _draw_simulation(axes: Any, simulated: Table) -> None:
    colors = [plots.BLUE if method == "screen" else plots.GREY for method in simulated.method]
    axes.barh(range(len(simulated)), simulated.picked, color=colors, height=0.7)
    for place, picked in enumerate(simulated.picked):
        axes.text(picked + 0.01, place, f"{picked:.0%}", va="center", size=8)
    axes.axvline(0.05, color="black", lw=0.8, ls=":")
    axes.set_yticks(range(len(simulated)), simulated.method)
    axes.set(xlim=(0, 1.05), ylim=(len(simulated) - 0.5, -0.5))
    axes.set(xlabel="simulated equations without a penalty in which it picks one")
