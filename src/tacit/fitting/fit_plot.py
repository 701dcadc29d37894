"""A fit as a figure: its strengths with their intervals, and what it explains in every layer."""

import math
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from tacit.display import figures
from tacit.errors import InputError, check_choice
from tacit.fitting.error_bars import KINDS
from tacit.fitting.fit_rows import layer_rows
from tacit.fitting.gradient_plot import draw_gradients
from tacit.fitting.shares import column_groups
from tacit.fitting.summary import is_doubtful, shown_bars, title_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tacit.fitting.fits import Fit

PlotKind = Literal["strengths", "gradients", "layers"]
MOST_ROWS, MOST_LAYERS, MOST_COLUMNS, MOST_NUMBERS = 16, 40, 10, 6
"""Strengths that are drawn; layers and regularizers that are, of layers; columns of these that have
room for numbers."""
LONGEST = 20
"""Letters of a name."""
ROW, BAR = 0.2, 1.0
"""Inches of a row, and of a bar of colours at least."""


def draw_fit(fit: "Fit", kind: PlotKind) -> "Figure":
    """The figure of this kind; see `Fit.plot`."""
    drawn = {"strengths": draw_strengths, "gradients": draw_gradients, "layers": draw_layers}
    check_choice("kind", kind, drawn)
    with figures.style():
        return drawn[kind](fit)


def draw_strengths(fit: "Fit") -> "Figure":
    """A panel per regularizer, whose strengths have one unit, with a row per strength."""
    names = _names_to_draw(fit)
    groups = [
        [name for name in (fit.equations.names[c] for c in columns) if name in names]
        for columns in column_groups(fit.equations).values()
    ]
    groups = [group for group in groups if group]
    remarks = []
    if len(names) < len(fit.strengths):
        remarks = [f"{len(names)} of {len(fit.strengths)} strengths, those of largest share."]
    title, kinds = title_lines(fit, *remarks), list(shown_bars(fit))
    heights = [ROW * len(group) for group in groups]
    size = sum(heights) + 0.3 * len(groups) + 0.17 * len(title) + 0.15 * len(kinds) + 0.6
    figure = figures.new_figure(figures.COLUMN, size)
    panels: Any = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)
    labels = iter(figures.write_names([name for group in groups for name in group], LONGEST))
    for axes, group in zip(panels[:, 0], groups, strict=True):
        _draw_group(axes, fit, group, kinds)
        axes.set_yticks(range(len(group)), [*islice(labels, len(group))])
    panels[-1, 0].set_xlabel("strength λ̂")
    if kinds:
        _write_legend(figure, kinds)
    figures.set_title(figure, title)
    return figure


def _names_to_draw(fit: "Fit") -> set[str]:
    """All strengths, or those with the largest shares."""
    return set(sorted(fit.shares, key=lambda name: -abs(fit.shares[name]))[:MOST_ROWS])


def _write_legend(figure: "Figure", kinds: list[str]) -> None:
    """What the intervals are for, one line each."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **_stroke(*each)) for each in enumerate(kinds)]
    labels = [f"95 %, for {KINDS[kind]}" for kind in kinds]
    if "layers" in kinds:  # which is no precision
        labels[kinds.index("layers")] = "disagreement of layers"
    figure.legend(lines, labels, loc="outside lower left", handlelength=2.4, borderpad=0)


def _stroke(place: int, kind: str) -> dict[str, Any]:
    """Of a kind of intervals; those of layers, which are no precision, always look the same."""
    color, dashes = figures.SERIES[place % len(figures.SERIES)]
    if kind == "layers":
        color, dashes = figures.GREY, ":"
    return {"color": color, "linestyle": dashes, "linewidth": 1.6}


def _draw_group(axes: Any, fit: "Fit", names: list[str], kinds: list[str]) -> None:
    """The strengths of one regularizer, with one line per kind of error bars."""
    intervals, ends = fit.intervals(), [0.0]
    undetermined = {name for name in names if math.isinf(fit.inflation[name])}
    filled = figures.DARK if not is_doubtful(fit) else "white"
    for place, name in enumerate(names):
        strength = fit.strengths[name]
        ends.append(strength)
        for number, kind in enumerate(kinds):
            low, high = intervals[kind][name]
            height = place + 0.5 * (number + 0.5) / len(kinds) - 0.25
            height = place if len(kinds) == 1 else height
            if math.isinf(high - low) and kind != "layers":
                axes.axhline(height, zorder=2, **_stroke(number, kind))  # from end to end
            if math.isfinite(high - low):
                axes.plot([low, high], [height] * 2, zorder=2, **_stroke(number, kind))
                ends += [low, high]
        axes.plot(
            strength, place, "o", mfc=filled, mec=figures.DARK, mew=1, zorder=3, clip_on=False
        )
        text = "not determined" if name in undetermined else figures.write_number(strength)
        axes.text(
            1.04, place, text, transform=axes.get_yaxis_transform(), va="center",
            fontsize=figures.SMALL,
        )  # fmt: skip
    axes.axvline(0, color="black", linewidth=0.6, zorder=1)
    axes.spines["left"].set_visible(False)
    margin = 0.06 * (max(ends) - min(ends)) or 1.0
    axes.set_xlim(min(ends) - margin, max(ends) + margin)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    figures.write_ticks(axes.xaxis)


def draw_layers(fit: "Fit") -> "Figure":
    """What every regularizer explains of every layer's target, in the fit of that layer."""
    labels, rows = _layer_shares(fit)
    if not rows:
        raise InputError(
            "no layer has equations: the gradients of all regularizers are zero there, as those of "
            "zero weights are. Fit other weights, or call plot('strengths')."
        )
    omitted, regularizers = len(fit.layers) - len(rows), len(column_groups(fit.equations))
    remark = "Fitted layer by layer (in brackets: its part of the target)"
    remark += f"; without the {omitted} of smallest targets." if omitted else "."
    remarks = [remark]
    if len(labels) <= regularizers:
        remarks.append(f"{len(labels) - 1} of {regularizers} regularizers, of largest share.")
    title = title_lines(fit, *remarks)
    names = figures.write_names(labels, LONGEST)
    cells_height = max(ROW * len(rows), BAR if len(labels) > MOST_NUMBERS else 0.0)
    height = cells_height + 0.07 * max(map(len, names)) + 0.17 * len(title) + 0.4
    figure = figures.new_figure(figures.COLUMN, height)
    axes: Any = figure.subplots()
    cells = [[min(max(part, 0.0), 1.0) for part in shares] for _, _, shares in rows]
    image = axes.imshow(cells, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    if len(labels) <= MOST_NUMBERS:
        _write_numbers(axes, rows)
    else:
        figure.colorbar(image, ax=axes, label="part explained")
    layers = figures.write_names((layer for layer, _, _ in rows), LONGEST)
    parts = ["–" if math.isnan(part) else f"{part:.0%}" for _, part, _ in rows]
    axes.set_yticks(
        range(len(rows)), [f"{name} ({part})" for name, part in zip(layers, parts, strict=True)]
    )
    slant = {} if sum(map(len, names)) < 20 else {"rotation": 40, "ha": "left"}
    slant = {"rotation": 90} if len(labels) > MOST_NUMBERS else slant
    axes.set_xticks(range(len(names)), names, **slant)
    axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    axes.axvline(len(labels) - 1.5, color="white", linewidth=3)
    axes.spines[:].set_visible(False)
    figures.set_title(figure, title)
    return figure


def _write_numbers(axes: Any, rows: list[tuple[str, float, list[float]]]) -> None:
    for place, (_, _, shares) in enumerate(rows):
        for column, part in enumerate(shares):
            color = "white" if part > 0.55 else "black"
            text = f"{part:z.0%}".replace("-", "−")
            axes.text(
                column, place, text, ha="center", va="center", color=color, fontsize=figures.SMALL
            )


def _layer_shares(fit: "Fit") -> tuple[list[str], list[tuple[str, float, list[float]]]]:
    """Labels of columns; and by layer its part of the target, and what each column explains there.

    The columns are the regularizers, and what they explain together.
    """
    groups = column_groups(fit.equations)
    label_of = {fit.equations.names[c]: label for label, columns in groups.items() for c in columns}
    drawn = _regularizers_to_draw(fit)
    layers: dict[str, tuple[str, float, list[float]]] = {}
    for row in layer_rows(fit):
        empty = row["layer"], row["target_share"], [0.0] * len(drawn) + [row["explained"]]
        _, _, shares = layers.setdefault(row["layer"], empty)
        if (label := label_of[row["name"]]) in drawn:
            shares[drawn.index(label)] += row["share"]
    largest = sorted(layers, key=lambda layer: -layers[layer][1])[:MOST_LAYERS]
    return [*drawn, "all"], [layers[layer] for layer in layers if layer in largest]


def _regularizers_to_draw(fit: "Fit") -> list[str]:
    """All regularizers, or those with the largest shares, in their order."""
    groups, names = column_groups(fit.equations), fit.equations.names
    share_of = {
        label: abs(sum(fit.shares[names[c]] for c in columns)) for label, columns in groups.items()
    }
    largest = sorted(share_of, key=lambda label: -share_of[label])[:MOST_COLUMNS]
    return [label for label in groups if label in largest]
