"""One measurement a row, and all of them as plain text."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A measurement, as text and, where a bound holds it, as a number.

    Args:
        benchmark: what was measured, against what.
        measured: the result for the reader.
        value: the number that the bound holds.
        bound: the most that `value` may be; None where the result is only reported.
    """

    benchmark: str
    measured: str
    value: float = 0.0
    bound: float | None = None

    @property
    def held(self) -> bool:
        """Whether the value is within its bound, or has none."""
        return self.bound is None or self.value <= self.bound


def render(rows: Sequence[Row], *, enforced: bool) -> str:
    """The rows as a table; where bounds are not enforced, no verdict is given."""
    head = ("benchmark", "measured", "bound", "ok?")
    cells = [head, *(_cells(row, enforced=enforced) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    rule = "─" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(row: Row, *, enforced: bool) -> tuple[str, str, str, str]:
    if row.bound is None:
        return row.benchmark, row.measured, "–", "–"
    verdict = ("yes" if row.held else "NO") if enforced else "not enforced"
    return row.benchmark, row.measured, f"≤ {row.bound:g}", verdict
