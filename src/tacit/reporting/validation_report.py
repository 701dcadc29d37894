"""The report of a validation."""

from typing import TYPE_CHECKING

from tacit.fitting.summary import percent
from tacit.reporting.parts import (
    Contents,
    Section,
    Verdict,
    boxed_table,
    doubts,
    figures_section,
    pairs,
    paragraph,
    problems_section,
    try_figure,
    versions_section,
)
from tacit.validation.summary import describe_predictions, summarize_validation

if TYPE_CHECKING:
    from tacit.validation.retraining import Validation

QUESTION = "Does training with the estimated penalty reproduce the model?"
METHOD = (
    "The model was trained again on L + Σ λₖ Rₖ, without the technique, with the estimated "
    "strengths; and as a control on L alone, with only the known penalties. If the penalty is "
    "right, the first model returns to the original, and the control does not."
)


def validation_contents(validation: "Validation") -> Contents:
    """The report of a validation."""
    summary = summarize_validation(validation)
    tone, badge = doubts(validation.problems)
    (sentence,) = summary.lead
    control = describe_predictions(validation.control)
    further = [f"For comparison, the control, trained without the penalty: {control}."]
    if validation.settled:
        part = percent(max(validation.recovered, 0.0))
        further.append(f"The penalty recovers {part} of the distance from control to original.")
    (table,) = summary.tables
    figure = try_figure(
        validation.plot,
        "validation",
        "How far both models are from the original, on a logarithmic scale.",
        f"Distances of the penalised model and of the control from the original. {sentence}",
    )
    method = paragraph(METHOD) + pairs(
        [*summary.facts, ("trained with", validation.trainer)], "strengths and training"
    )
    return Contents(
        kind="validation by retraining",
        title="Validation of the estimated penalty",
        verdict=Verdict(tone, badge, sentence, tuple(further), QUESTION),
        sections=(
            Section("models", "Both models", boxed_table(table, "both models")),
            problems_section(validation.problems),
            figures_section([figure], "Figure"),
            Section("method", "How it was computed", method),
            versions_section(),
        ),
    )
