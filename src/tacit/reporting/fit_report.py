"""The report of a fit, and the sections that other reports share with it."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from tacit.display import Note, Summary
from tacit.display.figures import write_number
from tacit.display.numbers import round_with_ends
from tacit.errors import InputError, ProblemKind
from tacit.fitting.error_bars import KINDS
from tacit.fitting.layer_table import MAX_ROWS, summarize_layers
from tacit.fitting.metrics import widest
from tacit.fitting.summary import is_doubtful, lead, merge_similar, percent, summarize
from tacit.reporting.method import method_section, modes_of, question, target_sentence
from tacit.reporting.parts import (
    Contents,
    Section,
    Verdict,
    boxed_table,
    doubts,
    figures_section,
    paragraph,
    problems_section,
    try_figure,
    versions_section,
    write_numbers,
)

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit

MOST_NAMED = 3
"""Strengths that the verdict names."""
MOST_READ_ALOUD = 12
"""Strengths in the text alternative of a figure."""
COLUMNS = Note(
    "share: the part of the target that a regularizer explains; shares add up to the explained "
    "part. inflation: how much alike candidates blur a strength; 1 is not at all."
)


def fit_contents(fit: "Fit") -> Contents:
    """The report of a fit."""
    return Contents(
        kind=f"{' + '.join(modes_of(fit))} equations",
        title="Estimated regularization",
        verdict=fit_verdict(fit),
        sections=(
            strengths_section(fit),
            problems_section(merge_similar(fit.problems), fit.findings, map(str, ProblemKind)),
            _figures(fit),
            *layer_sections(fit),
            method_section(fit),
            versions_section(),
        ),
    )


def fit_verdict(fit: "Fit") -> Verdict:
    """What is explained and by which strengths, and whether to believe it."""
    tone, badge = doubts(fit.problems)
    first, *further = lead(fit)
    if has_no_signal(fit):
        tone = "bad"
    further += name_strengths(fit)
    return Verdict(tone, badge, first, (*further, target_sentence(fit)), question(fit))


def has_no_signal(fit: "Fit") -> bool:
    """Whether the target is only noise or rounding."""
    return any(problem.kind == ProblemKind.NO_SIGNAL for problem in fit.problems)


def name_strengths(fit: "Fit") -> list[str]:
    """A sentence with all strengths, if they are few and mean anything."""
    if has_no_signal(fit) or not 0 < len(fit.strengths) <= MOST_NAMED:
        return []
    return [f"{'; '.join(describe_strengths(fit))}."]


def describe_strengths(fit: "Fit") -> list[str]:
    """Every strength with its widest 95 % interval, in words."""
    intervals = {kind: each for kind, each in fit.intervals().items() if kind != "layers"}
    texts = []
    for name, strength in fit.strengths.items():
        if math.isinf(fit.inflation[name]):
            texts.append(f"the strength of {name} is not determined")
            continue
        shown, interval = write_number(strength), ""
        if (kind := widest(intervals, name)) is not None:
            low, high = intervals[kind][name]
            if low < high:
                rounded = round_with_ends(strength, low, high)
                shown, low_end, high_end = (text.replace("-", "−") for text in rounded)
                interval = f", 95 % interval {low_end} to {high_end} for {KINDS[kind]}"
        elif any(math.isinf(by_name[name][1]) for by_name in intervals.values()):
            interval = ", and no finite interval"
        shown = f"({shown})" if is_doubtful(fit) else shown
        texts.append(f"{name} has strength {shown}{interval}")
    return texts


def strengths_section(fit: "Fit", heading: str = "Strengths") -> Section:
    """The table of the summary, with what its columns mean."""
    summary = summarize(fit, most=MAX_ROWS)
    (table,) = summary.tables
    table = replace(table, notes=(COLUMNS, *table.notes))
    content = f"{boxed_table(table, heading)}\n{write_numbers(summary)}"
    return Section("strengths", heading, content)


def _figures(fit: "Fit") -> Section:
    read = "; ".join(describe_strengths(fit)[:MOST_READ_ALOUD])
    more = len(fit.strengths) - MOST_READ_ALOUD
    figures = [
        try_figure(
            fit.plot,
            "strengths",
            "Strengths, with their 95 % intervals where there are any.",
            f"Strengths on a line: {read}{f'; and {more} more' if more > 0 else ''}.",
        )
    ]
    origin = fit.equations.origin
    if {*modes_of(fit)} <= {"endpoint", "difference"} and origin and origin.point is not None:
        figures.append(
            try_figure(
                lambda: fit.plot("gradients"),
                "gradients",
                "Each dot is a parameter. On the diagonal, the penalties account for what is to "
                "be explained.",
                "Scatter plot of the target against the fitted penalty, one dot per parameter: "
                f"cosine {fit.cosine:.3f}, explained {percent(fit.explained)}.",
            )
        )
    return figures_section(figures)


def layer_sections(fit: "Fit") -> list[Section]:
    """What every layer says by itself, where there are several."""
    try:
        if len(fit.layers) < 2:
            return []
        summary: Summary = summarize_layers(fit)
    except InputError as error:
        return [Section("layers", "Layers", paragraph(str(error)))]
    (table,) = summary.tables
    figure = try_figure(
        lambda: fit.plot("layers"),
        "layers",
        "What every regularizer explains of each layer's target.",
        "Heat map of what every regularizer explains in each layer; the table has the numbers.",
    )
    content = f'<div class="figures">{figure}</div>\n{boxed_table(table, "layers")}'
    return [Section("layers", "Layers", content)]
