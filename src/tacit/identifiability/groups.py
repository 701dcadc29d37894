"""Columns by the names that users know: a column's own, or that of its family as a whole."""

from collections.abc import Iterable, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, NamedTuple

from tacit.equations import Equations
from tacit.errors import InputError
from tacit.params import shorten

if TYPE_CHECKING:
    from tacit.fitting import Fit


class Asked(NamedTuple):
    """Equations, and whether their strengths are held at zero or above."""

    equations: Equations
    nonnegative: bool


def asked(found: "Fit | Equations", what: str) -> Asked:
    """The equations of a fit, or the ones given."""
    equations = getattr(found, "equations", found)
    if not isinstance(equations, Equations):
        raise InputError(
            f"{what} was given a {type(found).__name__}: pass a Fit, or what endpoint_equations, "
            "difference_equations, trajectory_equations or stack return."
        )
    if not equations.rows:
        raise InputError(
            "there are no equations: every row was left out at a kink. Widen rows=, or use "
            "smooth_l1."
        )
    return Asked(equations, getattr(found, "nonnegative", False))


def groups(equations: Equations) -> dict[str, tuple[int, ...]]:
    """The columns of each regularizer: one goes by its own name, several by their family's.

    Where that name is taken (`layerwise(l2())` beside `l2()`), the several go by `l2[*]`, and the
    next by `l2[*2]`.
    """
    found: dict[str, tuple[int, ...]] = {}
    start = 0
    for family in equations.families:
        columns = tuple(range(start, start + family.size))
        start += family.size
        label = equations.names[columns[0]]
        if family.size > 1:
            others = (f"{family.name}[*{number}]" for number in count(2))
            free = chain([family.name, f"{family.name}[*]"], others)
            label = next(n for n in free if n not in found and n not in equations.names)
        found[label] = columns
    return found


def columns_of(equations: Equations, names: Iterable[str], *, what: str) -> tuple[int, ...]:
    """The columns that names stand for, each a column's or a regularizer's, in their order."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InputError(
            f"{what} is {names!r}: pass a list of names, as in ['l2']; there are "
            f"{shorten(_names(equations))}."
        )
    known = {name: (i,) for i, name in enumerate(equations.names)} | groups(equations)
    unknown = [str(name) for name in names if name not in known]
    if unknown:
        raise InputError(
            f"{what} names {shorten(unknown)}, which is not among the regularizers: there are "
            f"{shorten(_names(equations))}."
        )
    found = [column for name in names for column in known[name]]
    if len(set(found)) < len(found):
        raise InputError(f"{what} names a column twice: {shorten(map(str, names))}.")
    return tuple(found)


def _names(equations: Equations) -> list[str]:
    return list(dict.fromkeys([*groups(equations), *equations.names]))
