"""A summary as plain text of fixed width."""

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from tacit.display.contents import Column, Summary, Table
from tacit.errors import Problem

WIDTH = 88
"""Characters of a line."""
LABEL = 11
"""Characters of a fact's label."""
LONGEST_NAME = 34
GAPS = {"left": 3, "right": 1}
"""Spaces before a column of this alignment."""
RULE = "─" * WIDTH


def write_text(summary: Summary) -> str:
    """The parts of a summary one below the other, with rules between them."""
    facts = [line for label, text in summary.facts for line in _fact(label, text)]
    parts = [[*textwrap.wrap(summary.title, WIDTH), *facts]]
    for table in summary.tables:
        parts.append(_table(table))
        parts.append([line for note in table.notes for line in _note(*note)])
    parts.append(["   ".join(map(" ".join, line)) for line in summary.numbers])
    findings = [
        line
        for text in summary.findings
        for line in textwrap.wrap(f"Finding: {text}", WIDTH, subsequent_indent="  ")
    ]
    parts.append([*write_problems(summary.problems, summary.no_problems), *findings])
    lines = [line for text in summary.lead for line in textwrap.wrap(text, WIDTH)]
    for part in filter(None, parts):
        lines += [RULE] * bool(lines) + part
    return "\n".join(line.rstrip() for line in lines)


def write_problems(problems: Sequence[Problem], none: str = "No problems found.") -> list[str]:
    """The problems by number, or that there are none."""
    if not problems:
        return [none] * bool(none)
    return [
        line
        for number, problem in enumerate(problems, 1)
        for line in textwrap.wrap(f"[{number}] {problem}", WIDTH, subsequent_indent="    ")
    ]


def _fact(label: str, text: str) -> list[str]:
    """A label and its text, which may have lines of its own."""
    lines = [
        part
        for line in text.split("\n")
        for part in textwrap.wrap(line, WIDTH - LABEL, break_on_hyphens=False) or [""]
    ]
    return [f"{label if i == 0 else '':<{LABEL}}{line}" for i, line in enumerate(lines)]


def _note(text: str, is_detail: bool) -> list[str]:
    if is_detail:
        indent, further = "  ", "    "
    else:
        indent, further = "", "  "
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=further,
        break_on_hyphens=not is_detail,
    )


def _table(table: Table) -> list[str]:
    cells = [row for row in table.rows if len(row) == len(table.columns)]
    first = max([table.columns[0].width, *(min(LONGEST_NAME, len(row[0])) for row in cells)])
    written = [
        _align(
            [column.label, *(row[place] for row in cells)],
            column._replace(width=column.width if place else first),
            GAPS[column.align] if place else 0,
        )
        for place, column in _fitting(table.columns, first)
    ]
    head, *lines = map("".join, zip(*written, strict=True))
    remaining = iter(lines)
    shown = [head]
    for row in table.rows:
        is_remark = len(row) < len(table.columns)
        shown.append("".join(row) if is_remark else next(remaining))
    return shown if shown[-1] else shown[:-1]


def _fitting(columns: Sequence[Column], first: int) -> list[tuple[int, Column]]:
    """The columns with their places, without the last optional ones if they are too wide."""
    chosen = list(enumerate(columns))
    for place, column in reversed(chosen):
        if first + sum(c.width for _, c in chosen[1:]) <= WIDTH:
            break
        if column.optional:
            chosen.remove((place, column))
    return chosen


def _align(texts: list[str], column: Column, gap: int) -> list[str]:
    """A label and its cells in the column's width, after a gap. Numbers are never cut."""
    width = max(column.width - gap, 0)
    if column.align == "right":
        texts = [fit_name(texts[0], width), *texts[1:]]
        return [f"{'':{gap}}{text:>{width}}" for text in texts]
    texts = fit_names(texts, width) if width else texts
    return [f"{'':{gap}}{text:<{width}}" for text in texts]


def fit_names(names: Sequence[str], width: int) -> list[str]:
    """Names in that width; different names stay different, as far as that is possible.

    Names are cut in the middle. Where some would become equal, as names of layers with a number in
    the middle, the commonest words are initials instead: `l2[m.l.10.self_attn.q_proj]`.
    """
    cut = [fit_name(name, width) for name in names]
    if len({*cut}) == len({*names}):
        return cut
    words = Counter(word for name in {*names} for word in {*_split(name)})
    return [fit_name(_with_initials(name, words, width), width) for name in names]


def fit_name(name: str, width: int) -> str:
    """A name in that width, cut in the middle."""
    half = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - half]}…{name[-half:]}"


def _with_initials(name: str, words: Mapping[str, int], width: int) -> str:
    """The name with its commonest words as initials, or without them if it is still too wide."""
    parts = _split(name)
    places = [place for place, part in enumerate(parts) if part.isalpha()]
    places.sort(key=lambda place: -words[parts[place]])
    for place in places:
        if len("".join(parts)) > width:
            parts[place] = parts[place][0]
    for place in places:
        if len("".join(parts)) > width and parts[place + 1 : place + 2] in (["."], ["_"]):
            parts[place : place + 2] = "", ""
    return "".join(parts)


def _split(name: str) -> list[str]:
    """The words of a name, and what is between them: numbers and punctuation."""
    return re.split(r"([^A-Za-z]+)", name)
