"""The report of a screen."""

from typing import TYPE_CHECKING

from tacit.display import Column, Table
from tacit.errors import ProblemKind
from tacit.fitting.summary import merge_similar
from tacit.identifiability.screen_text import screen_rows, summarize_screen
from tacit.reporting.fit_report import layer_sections, name_strengths, strengths_section
from tacit.reporting.method import method_section, target_sentence
from tacit.reporting.parts import (
    Contents,
    Section,
    Tone,
    Verdict,
    boxed_table,
    figures_section,
    fold,
    pairs,
    paragraph,
    problems_section,
    try_figure,
    versions_section,
)

if TYPE_CHECKING:
    from tacit.identifiability.screening import Screen
    from tacit.identifiability.screening import Verdict as ScreenVerdict

QUESTION = "What regularization is in the model?"
BADGES: "dict[ScreenVerdict, tuple[Tone, str]]" = {
    "answer": ("good", "Confirmed, and the answer"),
    "aligned": ("doubt", "Confirmed, but not the answer"),
    "nothing": ("plain", "Nothing confirmed"),
    "ranked": ("doubt", "Too few layers or epochs for a test"),
    "no signal": ("bad", "No signal"),
}
TESTS = (
    "Candidates whose gradients have a cosine beyond ±0.7 form a group. A group is tested by what "
    "it adds to all others: signs of its scores are flipped by cluster, and p-values are corrected "
    "by Holm. Members of a confirmed group are ranked by what they explain in clusters that they "
    "were not fitted to."
)
COLUMNS = (
    Column("candidate", align="left"), Column("group"), Column("alone"), Column("added"),
    Column("held out"), Column("p"), Column("strength"), Column("chosen", align="left"),
)  # fmt: skip


def screen_contents(screen: "Screen") -> Contents:
    """The report of a screen."""
    sections = [_candidates(screen), _figure(screen)]
    if screen.fit is not None:
        fit = screen.fit
        problems = problems_section(
            merge_similar(fit.problems), fit.findings, map(str, ProblemKind)
        )
        sections += [strengths_section(fit, "The chosen candidates together"), problems]
        sections += [*layer_sections(fit), _method(screen), method_section(fit)]
    else:
        sections.append(_method(screen))
    kind, count = screen.clusters
    return Contents(
        kind=f"screen of {len(screen.table)} candidates over {count} {kind}",
        title="Screen for regularization",
        verdict=_verdict(screen),
        sections=(*sections, versions_section()),
    )


def _verdict(screen: "Screen") -> Verdict:
    tone, badge = BADGES[screen.verdict]
    first, separator, rest = screen.reason.partition(". ")
    sentence = first[:1].upper() + first[1:] if screen.fit is None else first
    further = [rest] if rest else []
    if screen.fit is not None:
        further += [*name_strengths(screen.fit), target_sentence(screen.fit)]
    return Verdict(tone, badge, sentence + separator.strip(), tuple(further), QUESTION)


def _candidates(screen: "Screen") -> Section:
    (table,) = summarize_screen(screen).tables
    content = boxed_table(table, "candidates by group")
    rows = tuple(
        (
            row["name"], str(row["group"]), f"{row['alone']:z.4f}", f"{row['added']:z.4f}",
            f"{row['held_out']:z.4f}", f"{row['p']:.3g}", f"{row['strength']:.4g}",
            "yes" if row["chosen"] else "",
        )
        for row in screen_rows(screen)
    )  # fmt: skip
    everything = boxed_table(Table(COLUMNS, rows), "all candidates")
    content += fold(f"All {len(rows)} candidates", everything)
    if screen.left_out:
        families = pairs(screen.left_out.items(), "families that were no candidates")
        content += fold("Families that were no candidates, and why", families)
    return Section("candidates", "Candidates", content)


def _figure(screen: "Screen") -> Section:
    best = max(screen.table, key=lambda row: row.alone, default=None)
    most = "" if best is None else f" Most alone: {best.name} with {best.alone:.1%}."
    figure = try_figure(
        screen.plot,
        "screen",
        "What candidates explain alone (bars), and add beside the chosen ones (marks).",
        f"Bars of what every candidate explains alone, by group.{most}",
    )
    return figures_section([figure], "Figure")


def _method(screen: "Screen") -> Section:
    kind, count = screen.clusters
    text = f"{TESTS} Clusters here: {count} {kind}."
    return Section("tests", "How candidates were tested", paragraph(text))
