"""A validation as a figure: how far the penalised model and the control are from the original."""

import math
from typing import TYPE_CHECKING, Any

from tacit.display import figures
from tacit.validation.summary import describe_predictions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tacit.validation.retraining import Validation

LABELS = {
    "disagreement": "classes that differ",
    "prediction_error": "prediction error",
    "relative_distance": "distance of weights",
}
LEAST = 1e-16
"""What is below is drawn here."""


def draw_validation(validation: "Validation") -> "Figure":
    """One row per measure, with both models on a logarithmic scale."""
    with figures.style():
        return _draw(validation)


def _draw(validation: "Validation") -> "Figure":
    from matplotlib.ticker import NullFormatter

    models = {"with the penalty": validation.penalised, "control": validation.control}
    measures = {
        field: [_measure(model, field) for model in models.values()]
        for field in LABELS
        if _measure(validation.penalised, field) is not None
    }
    title = [f"{describe_predictions(validation.penalised)}.".capitalize()]
    if kinds := dict.fromkeys(problem.kind for problem in validation.problems):
        title.append(f"Problems: {', '.join(kinds)}.")
    figure = figures.new_figure(figures.COLUMN, 1.1 + 0.22 * len(measures) + 0.3 * len(title))
    axes: Any = figure.subplots()
    sizes = [v for pair in measures.values() for v in pair if v is not None and math.isfinite(v)]
    most = 3 * max([LEAST, *sizes])
    points: list[list[tuple[float, int]]] = [[], []]
    for place, pair in enumerate(measures.values()):
        drawn = [_within(value, most) for value in pair]
        if None not in drawn:
            axes.plot(drawn, [place] * 2, color=figures.PALE, linewidth=2, zorder=1)
        for column, value in zip(points, drawn, strict=True):
            column += [] if value is None else [(value, place)]
    styles = (("o", figures.BLUE, figures.BLUE), ("s", "white", figures.DARK))
    for name, column, (marker, face, edge) in zip(models, points, styles, strict=True):
        x, y = zip(*column, strict=True) if column else ((), ())
        axes.plot(x, y, marker, mfc=face, mec=edge, ms=5, label=name, zorder=2, clip_on=False)
    least = min([_within(size, most) or most for size in sizes], default=LEAST)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlim=(min(least / 2, most / 100), most), ylim=(len(measures) - 0.5, -0.5))
    axes.set_yticks(range(len(measures)), [LABELS[field] for field in measures])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("relative to the original")
    figure.legend(loc="outside lower left", ncols=2, borderpad=0)
    figures.set_title(figure, title)
    return figure


def _measure(model: Any, field: str) -> float | None:
    if field == "disagreement":
        return None if model.agreement is None else 1 - model.agreement
    return getattr(model, field)


def _within(value: float | None, most: float) -> float | None:
    """The value on the axis: zero at its least end, and a model that diverged at its other."""
    if value is None or math.isnan(value):
        return None
    return min(max(value, LEAST), most)
