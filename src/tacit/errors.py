"""InputError for a wrong call, with the checks of single arguments; Problem for weak evidence."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import Any


class InputError(ValueError):
    """A call that cannot be answered: says what was given, what is needed, and what to do."""


class ProblemKind(StrEnum):
    """The kinds of problems of a fit, the gravest first."""

    NO_SIGNAL = "no signal"
    NOISY = "noisy"
    OBJECTIVE = "objective"
    UNEXPLAINED = "unexplained"
    UNIDENTIFIED = "unidentified"
    UNSETTLED = "unsettled"
    WEAK = "weak"
    NEGATIVE = "negative"
    DRIFTING = "drifting"


@dataclass(frozen=True)
class Problem:
    """A reason not to trust a result, in words a reader can act on.

    The kind of a fit's problem is a `ProblemKind`. `names` are the strengths that it concerns.
    """

    kind: str
    message: str
    remedy: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} {self.remedy}"


def check_type(name: str, value: Any, kind: Any, needed: str) -> None:
    """Check what an argument is, as isinstance does; `needed` says what to pass instead."""
    if not isinstance(value, kind):
        shown = repr(value) if isinstance(value, int | float | str | None) else ""
        if not 0 < len(shown) <= 40:
            type_name = type(value).__name__
            shown = f"an {type_name}" if type_name[0] in "aeiouAEIOU" else f"a {type_name}"
        raise InputError(f"{name} is {shown}: pass {needed}.")


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Check that an argument is a whole number, and not below the least."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} is {value!r}: pass a whole number, at least {least}.")


def check_number(
    name: str,
    value: Any,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> None:
    """Check that an argument is a finite number within these bounds."""
    try:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        number = float(value) if is_number else math.nan
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number >= least and above < number < below):
        bounds = {"at least": least, "above": above, "below": below}.items()
        stated = "".join(f", {word} {bound:g}" for word, bound in bounds if math.isfinite(bound))
        raise InputError(f"{name} is {value!r}: pass a finite number{stated}.")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Check that an argument is one of the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise InputError(f"{name} is {value!r}: pass one of {', '.join(map(repr, choices))}.")
