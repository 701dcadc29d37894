"""The strengths of a fit as rows of a table, by strength or by layer, with a verdict on each."""

import math
from typing import TYPE_CHECKING, Any, Literal

from tacit.errors import ProblemKind
from tacit.fitting.fit_difference import p_value
from tacit.fitting.metrics import widest
from tacit.fitting.shares import column_groups
from tacit.fitting.summary import shown_bars

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit

By = Literal["strength", "layer"]


def strength_rows(fit: "Fit") -> list[dict[str, Any]]:
    """One row per strength; see `Fit.to_frame`."""
    label_of = {
        fit.equations.names[column]: label
        for label, columns in column_groups(fit.equations).items()
        for column in columns
    }
    intervals, shown, steps = fit.intervals(), shown_bars(fit), fit.step_errors
    rows = []
    for name, strength in fit.strengths.items():
        row: dict[str, Any] = {
            "name": name,
            "regularizer": label_of[name],
            "strength": strength,
            "share": fit.shares[name],
            "unique_share": fit.unique[label_of[name]],
            "inflation": fit.inflation[name],
        }
        for kind in shown:
            row[f"{kind}_error"] = fit.standard_errors[kind][name]
            row[f"{kind}_low"], row[f"{kind}_high"] = intervals[kind][name]
        row |= {"step_error": steps[name]} if steps else {}
        rows.append(row | {"verdict": _verdict(fit, name, intervals)})
    return rows


def layer_rows(fit: "Fit") -> list[dict[str, Any]]:
    """One row per layer and strength, of the fits of single layers."""
    count = len(fit.equations.names)
    square_norms = {
        label: float(factor[:, count:].mean(1).square().sum())
        for label, factor in zip(fit.equations.layers, fit.equations.layer_factors(), strict=True)
    }
    whole = sum(square_norms.values())
    return [
        {
            "layer": label,
            "target_share": square_norms[label] / whole if whole else math.nan,
            "explained": part.explained,
            **row,
        }
        for label, part in fit.layers.items()
        for row in strength_rows(part)
    ]


def _verdict(fit: "Fit", name: str, intervals: dict[str, dict[str, tuple[float, float]]]) -> str:
    """The gravest problem of a strength; without any, where its widest interval lies."""
    for problem in fit.problems:
        if not problem.names or name in problem.names:
            return str(problem.kind)
    if fit.nonnegative and not fit.strengths[name]:
        return "bounded"
    kind = widest({k: by_name for k, by_name in intervals.items() if k != "layers"}, name)
    if kind is None:
        return "no interval"
    low, high = intervals[kind][name]
    return "above zero" if low > 0 else "below zero" if high < 0 else "around zero"


def coefficient_rows(fit: "Fit") -> dict[str, dict[str, float]]:
    """By strength: b, se, t, p and the interval, as packages for tables of regressions name them.

    The error bars are the kind that is widest for the strength, without `layers`. There is no p
    where a problem concerns the strength: a small one would be read as a confirmation. Only of
    noise there may be one, because the error bars contain it.
    """
    intervals = {kind: each for kind, each in fit.intervals().items() if kind != "layers"}
    hidden = [problem for problem in fit.problems if problem.kind != ProblemKind.NOISY]
    rows = {}
    for index, (name, strength) in enumerate(fit.strengths.items()):
        kind, error, (low, high), p = (
            widest(intervals, name),
            math.nan,
            (math.nan, math.nan),
            math.nan,
        )
        if kind is not None:
            bars = fit.error_bars[kind]
            error, (low, high) = bars.standard_errors[name], intervals[kind][name]
            p = p_value(strength, error, bars.freedoms[index] if bars.freedoms else bars.freedom)
        if any(not problem.names or name in problem.names for problem in hidden):
            p = math.nan
        t = strength / error if error else math.nan
        rows[name] = {"b": strength, "se": error, "t": t, "p": p, "ci95l": low, "ci95u": high}
    return rows


def regression_statistic(fit: "Fit", key: str) -> float | int | None:
    """A number of the fit by the name that packages for tables of regressions have for it."""
    if key == "N":
        return max(source.examples for source in fit.sources)
    if key == "r2":
        return fit.explained
    if key == "problems":
        return len(fit.problems)
    plain = {"explained", "cosine", "residual_ratio", "matching_loss", "condition"}
    return getattr(fit, key) if key in plain | {"gradient_norm", "rank", "rows"} else None
