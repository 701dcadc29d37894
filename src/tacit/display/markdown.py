"""A summary as Markdown, with tables as GitHub has them."""

import re
from collections.abc import Iterator

from tacit.display.contents import Row, Summary, Table

SPECIAL = re.compile(r"([\\`*_\[\]<>|~$&#])")
AT_START = re.compile(r"^(\d*)([-+.)](?=\s|$)|=)")
"""What begins a list, or underlines a heading, at the start of a line."""


def write_markdown(summary: Summary) -> str:
    """Paragraphs, lists and tables; every character that Markdown reads is escaped."""
    parts = [f"**{escape(text)}**" for text in summary.lead]
    parts.append(escape(summary.title))
    parts.append("\n".join(_item(f"{label}: {text}") for label, text in summary.facts))
    for table in summary.tables:
        parts.append("\n".join(_table(table)))
        parts.append("\n".join(_notes(table)))
    numbers = [" ".join(pair) for line in summary.numbers for pair in line]
    parts.append(escape(", ".join(numbers)))
    parts.append("\n".join(_problems(summary)))
    parts += [f"Finding: {escape(text)}" for text in summary.findings]
    return "\n\n".join(part for part in parts if part)


def escape(text: str) -> str:
    """The text as it is to be read, on one line."""
    return AT_START.sub(r"\1\\\2", SPECIAL.sub(r"\\\1", " ".join(text.split())))


def _item(text: str) -> str:
    return f"- {escape(text)}"


def _table(table: Table) -> Iterator[str]:
    """Rows between pipes; a remark is in the first column, and gaps are left out."""
    yield _row(tuple(column.label for column in table.columns))
    yield "|" + "|".join("---:" if c.align == "right" else ":---" for c in table.columns) + "|"
    for row in filter(None, table.rows):
        yield _row(row + ("",) * (len(table.columns) - len(row)))


def _row(cells: Row) -> str:
    return f"| {' | '.join(map(escape, cells))} |"


def _notes(table: Table) -> Iterator[str]:
    for note in table.notes:
        yield "  " * note.is_detail + _item(note.text)


def _problems(summary: Summary) -> Iterator[str]:
    if not summary.problems and summary.no_problems:
        yield escape(summary.no_problems)
    for number, problem in enumerate(summary.problems, 1):
        kind, message, remedy = map(escape, (problem.kind, problem.message, problem.remedy))
        yield f"{number}. **{kind}**: {message} *{remedy}*"
