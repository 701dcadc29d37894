"""What a summary says, whatever its format."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from tacit.errors import Problem

Row = tuple[str, ...]
"""One cell per column. A single cell is a remark across all columns, and none is a gap."""


class Column(NamedTuple):
    """A column of a table."""

    label: str
    width: int = 0
    """Characters in text; of the first column the least."""
    align: Literal["left", "right"] = "right"
    optional: bool = False
    """Whether it may be left out in text, where the table would be too wide."""


class Note(NamedTuple):
    """A paragraph below a table."""

    text: str
    is_detail: bool = False
    """Whether it belongs to the note above it."""


@dataclass(frozen=True)
class Table:
    """Rows of cells, as text."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Summary:
    """The content of a summary, in the order in which it is read."""

    title: str
    lead: tuple[str, ...] = ()
    """What to know first, in sentences."""
    facts: tuple[tuple[str, str], ...] = ()
    """What the result is of: labels and texts."""
    tables: tuple[Table, ...] = ()
    numbers: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Lines of labels and numbers."""
    problems: tuple[Problem, ...] = ()
    findings: tuple[str, ...] = ()
    no_problems: str = ""
    """What to say where there are no problems; empty where nobody looked for any."""
