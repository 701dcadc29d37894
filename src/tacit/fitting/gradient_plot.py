"""The target of a fit against the fitted penalty, one dot per parameter."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tacit.display import figures
from tacit.equations.candidates import BoundCandidates
from tacit.equations.difference import difference_target
from tacit.equations.rows import read_rows
from tacit.equations.target import Origin, Target, endpoint_target, origin_of
from tacit.errors import InputError
from tacit.fitting.summary import title_lines
from tacit.objective.ranks import check_alone

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tacit.fitting.fits import Fit

MOST_DOTS, MOST_READ = 3000, 200_000
"""Parameters that are drawn one by one; above, cells are drawn as dark as they have parameters, and
of more than the second number only every second, third, … parameter is read."""
LONGEST = 16
"""Letters of a name."""
LABELS = {
    "endpoint": ("fitted penalty, Σ λ̂ ∂R/∂θ", "negative loss gradient, −∂L/∂θ"),
    "difference": ("fitted penalty, Σ λ̂ ∂R/∂θ", "∂L/∂θ with the technique − without"),
}


def draw_gradients(fit: "Fit") -> "Figure":
    """Dots near the diagonal: the penalties account for the target, parameter by parameter."""
    fitted, target, every = matched_gradients(fit)
    known = "∂L/∂θ − known penalties" if any(s.known for s in fit.sources) else ""
    x_label, y_label = LABELS[fit.sources[0].mode]
    y_label = f"−{known}" if known and fit.sources[0].mode == "endpoint" else y_label
    remarks = [f"One in {every} parameters is drawn."] if every > 1 else []
    figure = figures.new_figure(figures.COLUMN, 3.5 + 0.1 * len(remarks))
    axes: Any = figure.subplots()
    limit = 1.05 * max(float(fitted.abs().max()), float(target.abs().max())) or 1.0
    axes.axline((0, 0), slope=1, color=figures.GREY, linewidth=0.8, zorder=0)
    extent = (-limit, limit, -limit, limit)
    if len(target) > MOST_DOTS:
        axes.hexbin(
            fitted.numpy(), target.numpy(), gridsize=60, extent=extent, bins="log", mincnt=1,
            cmap="Blues", vmin=0.3, linewidths=0,
        )  # fmt: skip
    else:
        axes.scatter(
            fitted.numpy(), target.numpy(), s=8, alpha=0.6, color=figures.BLUE, linewidths=0
        )
    axes.set(xlim=extent[:2], ylim=extent[2:], aspect="equal", xlabel=x_label, ylabel=y_label)
    figures.write_ticks(axes.xaxis)
    figures.write_ticks(axes.yaxis)
    names = figures.write_names([*fit.strengths][:4], LONGEST)
    strengths = [
        f"{name}: λ̂ = {figures.write_number(value)}"
        for name, value in zip(names, fit.strengths.values(), strict=False)
    ]
    more = [f"and {len(fit.strengths) - 4} more"] if len(fit.strengths) > 4 else []
    axes.text(
        0.03, 0.97, "\n".join([*strengths, *more]), transform=axes.transAxes, va="top",
        fontsize=figures.SMALL,
    )  # fmt: skip
    figures.set_title(figure, title_lines(fit, *remarks))
    return figure


def matched_gradients(fit: "Fit") -> tuple[Tensor, Tensor, int]:
    """Σ λ̂_k ∇R_k and the target of every parameter, or of one of so many.

    Rows at kinks, which are in no equation, are left out.
    """
    origin = origin_of(fit, "plot('gradients')")
    check_alone(origin.setting.ranks, "plot('gradients')")
    bound = origin.bind()
    vectors = _target_again(origin, bound, fit).points[0].vectors
    every = max(1, math.ceil(fit.rows / MOST_READ))
    strengths = torch.tensor(list(fit.strengths.values()), dtype=torch.float64)
    pairs: list[Tensor] = []
    start = 0
    for design, values, columns in _read(bound, vectors):
        fitted = design @ strengths[list(columns)] if columns else torch.zeros(len(values))
        pair = torch.stack([fitted.double(), values.mean(1)])
        pairs.append(pair[:, -start % every :: every])
        start += len(values)
    fitted, target = torch.cat(pairs, dim=1)
    return fitted, target, every


def _read(bound: BoundCandidates, vectors: Any) -> Iterator[tuple[Tensor, Tensor, tuple[int, ...]]]:
    """The rows of [design | targets] that are equations, slice by slice, and their columns."""
    for name in bound.rows:
        columns = bound.columns.active.get(name, ())
        for part in bound.slices(name, len(columns) + len(vectors)):
            design, values, kinks = read_rows(bound, name, part, vectors)
            design, values = design.cpu(), values.cpu()
            if kinks is not None:
                design, values = design[~kinks.cpu()], values[~kinks.cpu()]
            yield design, values, tuple(columns)


def _target_again(origin: Origin, bound: BoundCandidates, fit: "Fit") -> Target:
    """The target, computed again: equations do not store its vectors."""
    setting = origin.setting
    if setting.mode == "endpoint":
        target = endpoint_target(setting.objective, params=bound.params)
    elif setting.mode == "difference" and setting.plain is not None:
        target = difference_target(
            setting.objective, setting.plain, params=bound.params,
            groups=setting.groups if setting.groups > 1 else None,
        )  # fmt: skip
    else:
        raise InputError(
            f"the fit is of {setting.mode} equations, whose target needs the recorded training: "
            "plot('gradients') is for endpoints and differences. Call plot('strengths')."
        )
    norm = target.points[0].gradient_norm
    if not math.isclose(norm, fit.gradient_norm, rel_tol=1e-4, abs_tol=1e-12):
        raise InputError(
            f"computed again, ‖∇L‖ is {norm:.6g} and not {fit.gradient_norm:.6g}: the data has "
            "changed since the equations were written. Write them again, and fit those."
        )
    return target
