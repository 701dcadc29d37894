"""What the summary of a validation says, and its problems."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tacit.display import Column, Note, Summary, Table
from tacit.errors import Problem
from tacit.objective.params import shorten

if TYPE_CHECKING:
    from tacit.validation.retrained import Retrained
    from tacit.validation.retraining import Validation

UNFINISHED = 1e-3
"""Training is finished once ‖∇(L+R)‖ is at most this fraction of ‖∇L(θ̂)‖."""

UNLIKE = 0.1
"""Predictions are not recovered if they differ by more than this part, and there is no control."""

TABLE_ROWS = {
    "agreement of classes": "agreement",
    "prediction error": "prediction_error",
    "weight distance": "distance",
    "  relative to ‖θ̂‖": "relative_distance",
    "cosine of the weights": "cosine",
    "loss difference": "loss_difference",
    "final gradient norm": "final_gradient_norm",
}
"""Labels of the summary's table, and the fields of Retrained that they show."""


def unbounded(validation: "Validation") -> Iterator[Problem]:
    """L + R has no minimum, or the control diverged."""
    certificate = validation.certificate
    certified = certificate is not None and certificate.verdict == "unbounded"
    if certified or math.isinf(validation.penalised.distance):
        negative = tuple(n for n, strength in validation.strengths.items() if strength < 0)
        yield Problem(
            "unbounded",
            "L + R is unbounded below: it has no minimum that retraining could reach.",
            "Fit with nonnegative=True, or use the strengths only as a description of gradients at "
            f"these weights. Negative strengths: {shorten(negative) or 'none'}.",
            negative,
        )
    if math.isinf(validation.control.distance):
        yield Problem(
            "unbounded",
            "training of the control, on the loss without the estimated penalty, diverged: there "
            "is nothing to compare with.",
            "Use a loss that is bounded below, or pass train= with your own stopping rule.",
        )


def unfinished(validation: "Validation", gradient_limit: float) -> Iterator[Problem]:
    """Training stopped where ‖∇(L+R)‖ is above the limit."""
    models = {"penalised model": validation.penalised, "control": validation.control}
    for name, model in models.items():
        if gradient_limit < model.final_gradient_norm < math.inf:
            yield Problem(
                "unfinished",
                f"training of the {name} stopped at gradient norm {model.final_gradient_norm:.2g}, "
                f"above {gradient_limit:.2g}: the distances mix the effect of the penalty with "
                "unfinished training.",
                "Train longer, or in float64.",
            )


def not_recovered(validation: "Validation", precision: float) -> Iterator[Problem]:
    """Nothing to recover, up to a relative distance of `precision`, or nothing recovered."""
    control_distance = validation.control.relative_distance
    if control_distance <= precision:
        yield Problem(
            "nothing to recover",
            f"the control equals the original model (relative distance {control_distance:.2g}): "
            "the technique did not change the weights.",
            "Validate the penalty on a model that regularization did change.",
        )
    elif validation.recovered <= 0 and math.isfinite(validation.recovered):
        yield Problem(
            "not recovered",
            "retraining with the penalty ended no closer to the original than the control did.",
            "Add candidates, or see the problems of the fit.",
        )
    elif not validation.settled and UNLIKE < _unlike(validation.penalised) < math.inf:
        yield Problem(
            "not recovered",
            f"{describe_predictions(validation.penalised)}, and there is no control that settled "
            "to compare this with.",
            "Add candidates, or see the problems of the fit.",
        )


def not_certified(validation: "Validation", no_hessian: str, *, local: bool) -> Iterator[Problem]:
    """Retraining need not return to θ̂, or `no_hessian` says why that is not known."""
    certificate = validation.certificate
    if certificate is None:
        remedy = "This concerns only the certificate; the comparison with the control is valid."
        yield Problem("no certificate", no_hessian, remedy)
    elif certificate.verdict in ("not unique", "not a minimum"):
        remedy = "The weights need not agree: compare predictions and losses instead."
        yield Problem(certificate.verdict, certificate.message, remedy)
    if local and (certificate is None or not certificate.is_global):
        yield Problem(
            "local",
            "retraining started at the trained weights, so it could reach only nearby minima.",
            "Pass start=, the initialisation of the original training, or your own train=.",
        )


def summarize_validation(validation: "Validation") -> Summary:
    """Table of the two models, what was recovered, certificate, and problems."""
    strengths = [f"{name} = {value:.4g}" for name, value in validation.strengths.items()]
    notes = [_recovered(validation)]
    if validation.certificate is not None:
        notes.append(f"certificate  {validation.certificate}")
    columns = (
        Column("compared with the original", 28, "left"),
        Column("with the penalty", 20),
        Column("control", 20),
    )
    rows = tuple(_table_rows(validation.penalised, validation.control))
    return Summary(
        title=f"tacit: validation by retraining, with {validation.trainer}",
        lead=(f"{describe_predictions(validation.penalised)}.".capitalize(),),
        facts=(
            ("penalty", shorten(strengths, most=12)),
            ("loss", f"{validation.loss:.6g} at the original weights"),
        ),
        tables=(Table(columns, rows, tuple(map(Note, notes))),),
        problems=validation.problems,
        no_problems="No problems found.",
    )


def _unlike(model: "Retrained") -> float:
    """How far predictions are from the original's: relative error, and 1 − agreement of classes."""
    return max(model.prediction_distance, 0.0 if model.agreement is None else 1 - model.agreement)


def describe_predictions(penalised: "Retrained") -> str:
    """How well the retrained model predicts what the original does, in words."""
    if math.isinf(penalised.distance):
        return "retraining with the penalty diverged"
    error, agreement = penalised.prediction_error, penalised.agreement
    by = "" if error is None else f"outputs differ by {error:.2g} in relative norm"
    if agreement is None:
        return f"the retrained model's {by}"
    classes = f"the retrained model agrees with the original on {agreement:.1%} of the classes"
    return f"{classes}; {by}" if by else classes


def _recovered(validation: "Validation") -> str:
    if not validation.settled:
        return (
            "recovered  – (the control did not settle at a minimum: beside it any model would seem "
            "close to the original)"
        )
    predictions = _number(validation.recovered_predictions, ".4f")
    return f"recovered  predictions {predictions}   weights {_number(validation.recovered, '.4f')}"


def _table_rows(penalised: "Retrained", control: "Retrained") -> Iterator[tuple[str, ...]]:
    for label, field in TABLE_ROWS.items():
        pair = getattr(penalised, field), getattr(control, field)
        if any(value is not None for value in pair):
            yield label, *(_number(value, ".4g") for value in pair)


def _number(value: float | None, style: str) -> str:
    if value is None or math.isnan(value):
        return "–"
    return ("∞" if value > 0 else "−∞") if math.isinf(value) else format(value, style)
