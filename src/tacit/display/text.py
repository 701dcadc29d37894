"""A summary as plain text of fixed width."""

import textwrap
from collections.abc import Sequence

from tacit.display.contents import Column, Row, Summary, Table
from tacit.errors import Problem

WIDTH = 88
"""Characters of a line."""
LABEL = 11
"""Characters of a fact's label."""
LONGEST_NAME = 34
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
    columns = _fitting(table.columns, first)
    lines = [_line([column.label for _, column in columns], columns, first)]
    for row in table.rows:
        if len(row) == len(table.columns):
            lines.append(_line([row[place] for place, _ in columns], columns, first))
        else:
            lines.append(row[0] if row else "")
    return lines if lines[-1] else lines[:-1]


def _fitting(columns: Sequence[Column], first: int) -> list[tuple[int, Column]]:
    """The columns with their places, without the last optional ones if they are too wide."""
    chosen = list(enumerate(columns))
    for place, column in reversed(chosen):
        if first + sum(c.width for _, c in chosen[1:]) <= WIDTH:
            break
        if column.optional:
            chosen.remove((place, column))
    return chosen


def _line(cells: Row | list[str], columns: Sequence[tuple[int, Column]], first: int) -> str:
    """The cells in their widths, the first one cut."""
    line = fit_name(cells[0], first)
    line = f"{line:>{first}}" if columns[0][1].align == "right" else f"{line:<{first}}"
    for text, (_, column) in zip(cells[1:], columns[1:], strict=True):
        if column.align == "left":
            line += f"   {text:<{max(column.width - 3, 0)}}"
        else:
            line += f" {text:>{column.width - 1}}"
    return line


def fit_name(name: str, width: int) -> str:
    """A name in that width; layers' names differ at their ends, so the middle is cut."""
    half = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - half]}…{name[-half:]}"
