"""What each regularizer adds to the explained fraction, and which columns a name refers to."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, NamedTuple

from tacit.equations.equations import Equations
from tacit.errors import InputError
from tacit.fitting.solving import System, explained
from tacit.objective.params import shorten

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit


class FittedSystem(NamedTuple):
    """Equations, and whether their strengths are fitted under λ ≥ 0."""

    equations: Equations
    nonnegative: bool


def unique_shares(fit: "Fit | Equations") -> dict[str, float]:
    """How much the explained fraction falls when a regularizer is left out and the rest refitted.

    A family of many columns (`layerwise(l2())`, `diagonal()`) is left out as a whole, under its
    name. Unlike `Fit.shares`, these do not sum to the explained fraction: what several regularizers
    could each explain is unique to none. With several groups of draws they are unbiased by the
    draws' noise, and may then be slightly below zero.

    >>> import tacit, torch
    >>> model = torch.nn.Linear(2, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
    >>> data = torch.eye(2).double(), torch.tensor([[2.0], [4.0]]).double()
    >>> pair = [tacit.l2(), tacit.l1()]
    >>> fit = tacit.estimate(model, torch.nn.functional.mse_loss, data, pair)
    >>> {name: round(share, 6) for name, share in unique_shares(fit).items()}
    {'l2': 0.1, 'l1': 0.0}
    """
    system = equations_of(fit, "unique_shares")
    all_columns, explained_by = range(len(system.equations.names)), _explained_by(system)
    whole = explained_by(all_columns)
    return {
        label: whole - explained_by([c for c in all_columns if c not in columns])
        for label, columns in column_groups(system.equations).items()
    }


def ordered_shares(fit: "Fit | Equations", order: Sequence[str] | None = None) -> dict[str, float]:
    """What each regularizer adds to the explained fraction when they enter in this order.

    They sum to the explained fraction. The first gets all that it can explain, the last only what
    is unique to it. The default is the order of the equations. Names are those of `unique_shares`.
    """
    system = equations_of(fit, "ordered_shares")
    groups = column_groups(system.equations)
    order = list(groups) if order is None else order
    columns_of(system.equations, order, what="order")
    if set(order) != set(groups):
        raise InputError(
            f"order is {shorten(order)}: it needs every regularizer once, which are "
            f"{shorten(groups)}."
        )
    explained_by, shares, before, columns = _explained_by(system), {}, 0.0, []
    for label in order:
        columns += groups[label]
        after = explained_by(columns)
        shares[label], before = after - before, after
    return shares


def _explained_by(system: FittedSystem) -> Callable[[Sequence[int]], float]:
    """A function from columns to the fraction that they explain by themselves."""
    factor, names = system.equations.factor(), system.equations.names
    targets = factor[:, len(names) :]

    def explained_by(columns: Sequence[int]) -> float:
        part = System(factor[:, list(columns)])
        solve = part.solve_nonnegative if system.nonnegative else part.solve
        return explained(part.design, solve(targets), targets) if columns else 0.0

    return explained_by


def equations_of(fit: "Fit | Equations", what: str) -> FittedSystem:
    """The equations of a fit, or the given equations."""
    equations = getattr(fit, "equations", fit)
    if not isinstance(equations, Equations):
        raise InputError(
            f"{what} was given a {type(fit).__name__}: pass a Fit, or what endpoint_equations, "
            "difference_equations, trajectory_equations or stack return."
        )
    if not equations.rows:
        raise InputError(
            "there are no equations: every row was left out at a kink. Widen rows=, or use "
            "smooth_l1."
        )
    return FittedSystem(equations, getattr(fit, "nonnegative", False))


def column_groups(equations: Equations) -> dict[str, tuple[int, ...]]:
    """The columns of each regularizer: a single one under its own name, several under the family's.

    If that name is taken (`layerwise(l2())` beside `l2()`), the family is called `l2[*]`, and the
    next one `l2[*2]`.
    """
    groups: dict[str, tuple[int, ...]] = {}
    start = 0
    for family in equations.families:
        columns = tuple(range(start, start + family.size))
        start += family.size
        label = equations.names[columns[0]]
        if family.size > 1:
            numbered = (f"{family.name}[*{number}]" for number in count(2))
            candidates = chain([family.name, f"{family.name}[*]"], numbered)
            label = next(n for n in candidates if n not in groups and n not in equations.names)
        groups[label] = columns
    return groups


def columns_of(equations: Equations, names: Iterable[str], *, what: str) -> tuple[int, ...]:
    """The indices of the named columns, in order; a name is that of a column or a regularizer."""
    by_name = {name: (i,) for i, name in enumerate(equations.names)} | column_groups(equations)
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InputError(
            f"{what} is {names!r}: pass a list of names, as in ['l2']; there are "
            f"{shorten(by_name)}."
        )
    unknown = [str(name) for name in names if name not in by_name]
    if unknown:
        raise InputError(
            f"{what} names {shorten(unknown)}, which is not among the regularizers: there are "
            f"{shorten(by_name)}."
        )
    columns = [column for name in names for column in by_name[name]]
    if len(set(columns)) < len(columns):
        raise InputError(f"{what} names a column twice: {shorten(map(str, names))}.")
    return tuple(columns)
