"""The report of a watch."""

from typing import TYPE_CHECKING

from tacit.fitting.summary import merge_similar
from tacit.reporting.fit_report import (
    MOST_READ_ALOUD,
    describe_strengths,
    layer_sections,
    name_strengths,
    strengths_section,
)
from tacit.reporting.method import method_section, target_sentence
from tacit.reporting.parts import (
    Contents,
    Section,
    Verdict,
    boxed_table,
    doubts,
    figures_section,
    problems_section,
    try_figure,
    versions_section,
)
from tacit.watching.watch_text import summarize_watch

if TYPE_CHECKING:
    from tacit.watching.training_watch import Watch

QUESTION = "Which penalties acted while the model trained?"


def watch_contents(watch: "Watch") -> Contents:
    """The report of a watch that has rows."""
    fit = watch.fit  # refused where there is no row yet
    summary = summarize_watch(watch.rows, watch.problems, None, "")
    tone, badge = doubts(watch.problems)
    sentence, *further = summary.lead
    further += name_strengths(fit)
    (table,) = summary.tables
    figure = try_figure(
        watch.plot,
        "watch",
        "Strengths with their 95 % intervals along training, and what they explain.",
        f"Strengths along {watch.rows[-1].update} updates. "
        f"At the end {'; '.join(describe_strengths(fit)[:MOST_READ_ALOUD])}.",
    )
    return Contents(
        kind=f"watch of {watch.rows[-1].update} updates",
        title="Regularization along training",
        verdict=Verdict(tone, badge, sentence, (*further, target_sentence(fit)), QUESTION),
        sections=(
            Section("rows", "Along training", boxed_table(table, "rows of the watch")),
            figures_section([figure], "Figure"),
            problems_section(merge_similar(watch.problems), fit.findings),
            strengths_section(fit, "Strengths in the last row"),
            *layer_sections(fit),
            method_section(fit),
            versions_section(),
        ),
    )
