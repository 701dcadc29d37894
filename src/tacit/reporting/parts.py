"""What a report consists of: a verdict, and sections of HTML."""

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal

import torch

import tacit
from tacit.display import Summary, Table
from tacit.display.html import write_note, write_pairs, write_table
from tacit.display.page import scroll_box
from tacit.errors import InputError, Problem
from tacit.reporting.inline_svg import write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 45
"""Rows of a table that is shown whole; a longer one is scrolled in its box."""
Tone = Literal["good", "doubt", "bad", "plain"]


@dataclass(frozen=True)
class Verdict:
    """What a reader is to know first."""

    tone: Tone
    badge: str
    """A few words: whether to trust what follows."""
    sentence: str
    further: tuple[str, ...] = ()
    question: str = ""
    """What the sentence answers."""


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading of its own."""

    name: str
    """Of the link to it."""
    heading: str
    content: str
    """HTML."""


@dataclass(frozen=True)
class Contents:
    """A report of one result."""

    kind: str
    """What was computed, in a few words."""
    title: str
    verdict: Verdict
    sections: tuple[Section, ...]


def paragraph(text: str) -> str:
    """A text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def fold(title: str, content: str) -> str:
    """HTML that is shown when its title is clicked; open on paper."""
    return f"<details><summary>{escape(title)}</summary>\n{content}\n</details>"


def boxed_table(table: Table, label: str) -> str:
    """A table that is scrolled in its own box, with its notes below."""
    notes = "\n".join(map(write_note, table.notes))
    tall = len(table.rows) > MOST_ROWS
    return f"{scroll_box(write_table(table), label, tall=tall)}\n{notes}"


def pairs(rows: Iterable[tuple[str, str]], label: str) -> str:
    """Labels and texts, in a box of their own."""
    return scroll_box(write_pairs(rows), label)


def write_numbers(summary: Summary) -> str:
    """The further numbers of a summary, folded."""
    rows = [pair for line in summary.numbers for pair in line]
    return fold("More numbers", pairs(rows, "more numbers")) if rows else ""


def doubts(problems: Sequence[Problem]) -> tuple[Tone, str]:
    """Tone and badge of a result with these problems."""
    if not problems:
        return "good", "No problems found"
    kinds = list(dict.fromkeys(str(problem.kind) for problem in problems))
    count = "1 reason" if len(kinds) == 1 else f"{len(kinds)} reasons"
    return "doubt", f"{count} for doubt: {', '.join(kinds)}"


def problems_section(
    problems: Sequence[Problem], findings: Sequence[str] = (), looked_for: Iterable[str] = ()
) -> Section:
    """Every problem with its remedy; without any, what was looked for."""
    items = [
        f'<li><span class="verdict doubt">{escape(str(problem.kind))}</span> '
        f"{escape(problem.message)}\n"
        f'<p class="remedy"><b>What to do:</b> {escape(problem.remedy)}</p></li>'
        for problem in problems
    ]
    content = '<ol class="problems">' + "\n".join(items) + "</ol>"
    if not problems:
        kinds = ", ".join(looked_for)
        sought = f" Looked for: {kinds}." if kinds else ""
        content = paragraph(f"No problems found.{sought}")
    content += "\n".join(paragraph(f"Finding: {finding}") for finding in findings)
    return Section("problems", "Problems and what to do", content)


def try_figure(draw: Callable[[], "Figure"], name: str, caption: str, alternative: str) -> str:
    """A figure, or why it cannot be drawn."""
    try:
        figure = draw()
    except InputError as error:
        return paragraph(f"{caption} Not drawn: {error}")
    return write_figure(figure, name, caption, alternative)


def figures_section(figures: Iterable[str], heading: str = "Figures") -> Section:
    """Figures beside each other where there is room."""
    return Section("figures", heading, '<div class="figures">' + "\n".join(figures) + "</div>")


def versions_section() -> Section:
    """The versions that the report was written with."""
    rows = [
        ("tacit", tacit.__version__),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
    ]
    return Section("versions", "Versions", pairs(rows, "versions"))
