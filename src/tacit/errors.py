"""InputError for a wrong call, Problem for weak evidence."""

from dataclasses import dataclass


class InputError(ValueError):
    """A call that cannot be answered: says what was given, what is needed, and what to do."""


@dataclass(frozen=True)
class Problem:
    """A reason not to trust a fit, in words a reader can act on.

    The kind of a fit's problem is one of: no signal, noisy, unexplained, underdetermined,
    collapsed, collinear, vanishing, unsettled, chance, faint, negative, indefinite, drifting,
    zeros. `names` are the strengths that it concerns.
    """

    kind: str
    message: str
    remedy: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} {self.remedy}"
