"""The problems of a fit as one string, the form in which rows store them."""

from collections.abc import Iterable

from tacit.errors import Problem


def join_kinds(problems: Iterable[Problem]) -> str:
    """The kinds of the problems, separated by commas; empty where there are none."""
    return ", ".join(problem.kind for problem in problems)
