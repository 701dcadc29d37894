"""What a table of problems is: tests with what they say, evaluated in order, shown as Markdown."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tacit.errors import Problem, ProblemKind
from tacit.fitting import drift, evidence
from tacit.fitting.evidence import Evidence
from tacit.objective.params import shorten

Finding = tuple[tuple[str, ...], dict[str, Any]]
"""The names of the strengths that a problem concerns, and the numbers in its message."""
Test = Callable[[Evidence], Iterator[Finding]]


class Row(NamedTuple):
    """One row of the table of problems."""

    kind: ProblemKind
    message: str
    remedy: str
    hides: tuple[ProblemKind, ...]
    """Kinds that later rows do not report for the same strengths; for all, if it names none."""
    test: Test
    together: bool
    """Whether all strengths that the test finds are reported as one problem."""

    def report(self, names: tuple[str, ...] = (), **numbers: Any) -> Problem:
        """The problem, with the names and numbers of one fit."""
        message = self.message.format(shown=shorten(names), **numbers)
        return Problem(self.kind, message, self.remedy, names)


def row(
    kind: ProblemKind,
    message: str,
    remedy: str,
    hides: tuple[ProblemKind, ...] = (),
    *,
    together: bool = False,
) -> Callable[[Test], Row]:
    """Make a test a row of the table; its name then refers to the row."""
    return lambda test: Row(kind, message, remedy, hides, test, together)


def diagnose(table: Sequence[Row], e: Evidence) -> tuple[Problem, ...]:
    """All problems of a fit, in the order of the table; each test is evaluated once."""
    reported: list[tuple[Row, Problem]] = []
    for row in table:
        hiding = [problem.names for by, problem in reported if row.kind in by.hides]
        if () in hiding:
            continue
        findings = [
            (names, numbers)
            for names, numbers in row.test(e)
            if not names or not any(set(names) <= set(others) for others in hiding)
        ]
        if row.together and findings:
            findings = [_join(findings)]
        reported += [(row, row.report(names, **numbers)) for names, numbers in findings]
    return tuple(problem for _, problem in reported)


def _join(findings: list[Finding]) -> Finding:
    """All findings as one: their names, and the first few of their numbers."""
    names = tuple(name for names, _ in findings for name in names)
    numbers = findings[0][1]
    return names, {key: shorten(f"{n[key]:.3g}" for _, n in findings) for key in numbers}


def markdown(table: Sequence[Row]) -> str:
    """The table for the documentation, with the values of the thresholds."""
    lines = ["| kind | reported when | what to do |", "| --- | --- | --- |"]
    thresholds = vars(evidence) | vars(drift)
    for row in table:
        when = " ".join((row.test.__doc__ or "").split()).format_map(thresholds)
        lines.append(f"| {row.kind} | {when} | {row.remedy} |")
    return "\n".join(lines)
