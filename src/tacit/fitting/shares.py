"""What each regularizer adds to a fit, and how much of that chance would add."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tacit.equations.equations import Equations
from tacit.errors import InputError
from tacit.fitting.solving import System, explained
from tacit.objective.params import shorten

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit

from collections.abc import Iterable
from itertools import chain, count
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit


class Asked(NamedTuple):
    """Equations, and whether their strengths are held at zero or above."""

    equations: Equations
    nonnegative: bool


def unique_shares(found: "Fit | Equations") -> dict[str, float]:
    """What the explained fraction falls by when a regularizer is left out and the rest refitted.

    A family of many columns (`layerwise(l2())`, `diagonal()`) leaves as a whole and goes by its
    name. Unlike `Fit.shares` these do not sum to what is explained: what several regularizers
    could each explain is unique to none. With several groups of draws they are free of the draws'
    noise on average, and may then come out a little below zero.

    >>> import tacit
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
    >>> data = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    >>> pair = [tacit.l2(), tacit.l1()]
    >>> found = tacit.estimate(model, torch.nn.functional.mse_loss, data, pair)
    >>> {name: round(share, 6) for name, share in unique_shares(found).items()}
    {'l2': 0.1, 'l1': 0.0}
    """
    given = equations_of(found, "unique_shares")
    everything, measure = range(len(given.equations.names)), _measure(given)
    whole = measure(everything)
    return {
        label: whole - measure([c for c in everything if c not in columns])
        for label, columns in column_groups(given.equations).items()
    }


def ordered_shares(
    found: "Fit | Equations", order: Sequence[str] | None = None
) -> dict[str, float]:
    """What each regularizer adds to the explained fraction when they enter in this order.

    They sum to what is explained. The first takes all that it can, the last what is unique to it;
    by default in the order of the equations. Names are those of `unique_shares`.
    """
    given = equations_of(found, "ordered_shares")
    parts = column_groups(given.equations)
    order = list(parts) if order is None else order
    columns_of(given.equations, order, what="order")
    if set(order) != set(parts):
        raise InputError(
            f"order is {shorten(order)}: it needs every regularizer once, which are "
            f"{shorten(parts)}."
        )
    measure, shares, before, inside = _measure(given), {}, 0.0, []
    for label in order:
        inside += parts[label]
        after = measure(inside)
        shares[label], before = after - before, after
    return shares


def _measure(given: Asked) -> Callable[[Sequence[int]], float]:
    """A function from columns to what they explain alone."""
    factor, count = given.equations.factor(), len(given.equations.names)
    targets = factor[:, count:]

    def measure(columns: Sequence[int]) -> float:
        system = System(factor[:, list(columns)])
        solve = system.solve_nonnegative if given.nonnegative else system.solve
        return explained(system.design, solve(targets), targets) if columns else 0.0

    return measure


def equations_of(found: "Fit | Equations", what: str) -> Asked:
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


def column_groups(equations: Equations) -> dict[str, tuple[int, ...]]:
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
    known = {name: (i,) for i, name in enumerate(equations.names)} | column_groups(equations)
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
    return list(dict.fromkeys([*column_groups(equations), *equations.names]))
