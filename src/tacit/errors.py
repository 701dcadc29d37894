"""The two ways in which tacit says no: a wrong call raises, weak evidence is reported."""

from dataclasses import dataclass


class InputError(ValueError):
    """A call that cannot be answered: says what was given, what is needed, and what to do."""


@dataclass(frozen=True)
class Problem:
    """A reason not to trust a fit, in words a reader can act on.

    `kind` of a fit's is one of: no signal, noisy, unexplained, underdetermined, collinear,
    collapsed, vanishing, unsettled, chance, faint, negative, indefinite, zeros, drifting. `names`
    are the strengths that it concerns.
    """

    kind: str
    message: str
    remedy: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} {self.remedy}"
