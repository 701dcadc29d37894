"""Rows of measurements, and their table as plain text."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A measurement, as text, and as a number where it has a bound.

    Args:
        benchmark: what was measured, relative to what.
        measured: the result as text.
        value: the number that is compared with the bound.
        bound: the largest allowed `value`; None where the result is only reported.
    """

    benchmark: str
    measured: str
    value: float = 0.0
    bound: float | None = None

    @property
    def within_bound(self) -> bool:
        """Whether the value is at most its bound, or there is no bound."""
        return self.bound is None or self.value <= self.bound


def render(rows: Sequence[Row], *, enforced: bool) -> str:
    """The rows as a table; without verdicts where bounds are not enforced."""
    header = ("benchmark", "measured", "bound", "ok?")
    cells = [header, *(_cells(row, enforced=enforced) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    rule = "─" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(row: Row, *, enforced: bool) -> tuple[str, str, str, str]:
    if row.bound is None:
        return row.benchmark, row.measured, "–", "–"
    verdict = ("yes" if row.within_bound else "NO") if enforced else "not enforced"
    return row.benchmark, row.measured, f"≤ {row.bound:g}", verdict
