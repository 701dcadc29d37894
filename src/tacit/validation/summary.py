"""A validation as text, and the reasons to doubt it."""

import math
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tacit.errors import Problem
from tacit.fitting.summary import WIDTH
from tacit.objective.params import shorten

if TYPE_CHECKING:
    from tacit.validation.retrained import Retrained
    from tacit.validation.retraining import Validation

UNFINISHED = 1e-3
"""‖∇(L+R)‖ beyond this part of ‖∇L(θ̂)‖: training stopped before it could be compared."""
NO_HESSIAN = "This concerns the certificate alone; judge by the comparison."

ROWS = {
    "weight distance": "distance",
    "  relative to ‖θ̂‖": "relative_distance",
    "cosine of the weights": "cosine",
    "prediction error": "prediction_error",
    "agreement of classes": "agreement",
    "loss difference": "loss_difference",
    "‖∇‖ reached": "stationarity",
}


def doubts(
    found: "Validation",
    *,
    force: float,
    floor: float,
    precision: float,
    local: bool,
    missing: str,
) -> tuple[Problem, ...]:
    """All problems of a validation, the gravest first.

    Args:
        found: the validation, without its problems.
        force: ‖∇L(θ̂)‖, what the penalty must balance.
        floor: the level of rounding in a gradient's norm.
        precision: relative distances below this are none.
        local: retraining began at θ̂ itself.
        missing: why there is no certificate, or nothing.
    """
    return tuple(
        problem
        for group in (
            _endless(found),
            _unfinished(found, max(UNFINISHED * force, floor)),
            _idle(found, precision),
            _uncertified(found, missing),
            _local(found, local),
        )
        for problem in group
    )


def _endless(found: "Validation") -> Iterator[Problem]:
    falls = found.certificate is not None and found.certificate.verdict == "unbounded"
    if falls or math.isinf(found.penalised.distance):
        negative = tuple(n for n, strength in found.strengths.items() if strength < 0)
        yield Problem(
            "unbounded",
            "L + R has no minimum: it falls without end, so that there is nothing to retrain to.",
            "Fit with nonnegative=True, or keep the strengths as a description of forces at these "
            f"weights only. Negative strengths: {shorten(negative) or 'none'}.",
            negative,
        )
    if math.isinf(found.control.distance):
        yield Problem(
            "unbounded",
            "the control, trained on the loss alone, left for infinity: nothing to compare with.",
            "Use a loss that is bounded below, or pass train= with your own stopping rule.",
        )


def _unfinished(found: "Validation", limit: float) -> Iterator[Problem]:
    for name, model in (("penalised model", found.penalised), ("control", found.control)):
        if limit < model.stationarity < math.inf:
            yield Problem(
                "unfinished",
                f"training of the {name} stopped at gradient norm {model.stationarity:.2g}, not "
                f"below {limit:.2g}: distances mix the penalty with unfinished training.",
                "Train longer, or in float64.",
            )


def _idle(found: "Validation", precision: float) -> Iterator[Problem]:
    if found.control.relative_distance <= precision:
        yield Problem(
            "nothing to recover",
            f"the control is the original model (relative distance "
            f"{found.control.relative_distance:.2g}): the technique left no mark on the weights.",
            "Judge the penalty on a model that regularization did change.",
        )
    elif found.recovered <= 0 and math.isfinite(found.recovered):
        yield Problem(
            "not recovered",
            "retraining with the penalty ended no nearer to the original than the control did.",
            "Add candidates, or look at the fit's own problems.",
        )


def _uncertified(found: "Validation", missing: str) -> Iterator[Problem]:
    if missing:
        yield Problem("no certificate", missing, NO_HESSIAN)
    elif found.certificate is not None:
        verdict = found.certificate.verdict
        if verdict in ("not unique", "not a minimum"):
            yield Problem(
                verdict,
                found.certificate.message,
                "Weights may differ by right: compare predictions and losses instead.",
            )


def _local(found: "Validation", local: bool) -> Iterator[Problem]:
    if local and not (found.certificate is not None and found.certificate.everywhere):
        yield Problem(
            "local",
            "retraining began at the trained weights, so only nearby minima were tried.",
            "Pass start=, the initialisation that training had, or your own train=.",
        )


def summary(found: "Validation") -> str:
    """Header, the two models beside each other, what was recovered, and notes."""
    rule = "─" * WIDTH
    penalty = ", ".join(f"{name} = {value:.4g}" for name, value in found.strengths.items())
    lines = [
        rule,
        f"tacit: validation by retraining, with {found.trainer}",
        *textwrap.wrap(f"penalty    {textwrap.shorten(penalty, 300)}", WIDTH),
        f"loss       {found.loss:.6g} at the original weights",
        rule,
        f"{'beside the original':<28}{'with the penalty':>20}{'control':>20}",
        *_table(found.penalised, found.control),
        rule,
        f"recovered  weights {_number(found.recovered, '.4f')}   "
        f"predictions {_number(found.recovered_predictions, '.4f')}",
    ]
    if found.certificate is not None:
        lines += textwrap.wrap(f"certificate  {found.certificate}", WIDTH, subsequent_indent="  ")
    lines.append(rule)
    for number, problem in enumerate(found.problems, 1):
        lines += textwrap.wrap(f"[{number}] {problem}", WIDTH, subsequent_indent="    ")
    return "\n".join(lines if found.problems else [*lines, "No problems found."])


def _table(penalised: "Retrained", control: "Retrained") -> Iterator[str]:
    for label, field in ROWS.items():
        pair = getattr(penalised, field), getattr(control, field)
        if any(value is not None for value in pair):
            yield f"{label:<28}" + "".join(f"{_number(value, '.4g'):>20}" for value in pair)


def _number(value: float | None, style: str) -> str:
    if value is None or math.isnan(value):
        return "–"
    return ("∞" if value > 0 else "−∞") if math.isinf(value) else format(value, style)
