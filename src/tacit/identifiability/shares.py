"""What each regularizer adds to a fit, and how much of that chance would add."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tacit.equations import Equations
from tacit.errors import InputError
from tacit.evidence import chances
from tacit.identifiability.groups import Asked, asked, columns_of, groups
from tacit.params import shorten
from tacit.solving import System, explained

if TYPE_CHECKING:
    from tacit.fitting import Fit


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
    given = asked(found, "unique_shares")
    everything, measure = range(len(given.equations.names)), _measure(given)
    whole = measure(everything)
    return {
        label: whole - measure([c for c in everything if c not in columns])
        for label, columns in groups(given.equations).items()
    }


def ordered_shares(
    found: "Fit | Equations", order: Sequence[str] | None = None
) -> dict[str, float]:
    """What each regularizer adds to the explained fraction when they enter in this order.

    They sum to what is explained. The first takes all that it can, the last what is unique to it;
    by default in the order of the equations. Names are those of `unique_shares`.
    """
    given = asked(found, "ordered_shares")
    parts = groups(given.equations)
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


def chance(found: "Fit | Equations") -> dict[str, float]:
    """For every column, how probably a random direction in its place would add as much as it does.

    The p-value of what a column adds beside the others, under the null of a direction drawn
    uniformly in the layers where the column is not zero: exact, whatever the target is, and without
    any assumption that parameters are independent. 1 where a column adds nothing. It says that a
    direction is no accident, not that its penalty was at work: see `null_distribution` for a null
    that keeps the column's sizes.
    """
    equations, nonnegative = asked(found, "chance")
    factor, count = equations.factor(), len(equations.names)
    design, target = factor[:, :count], factor[:, count:].mean(1)
    kept = list(range(count))
    if nonnegative:
        strengths = System(design).solve_nonnegative(target[:, None])[:, 0]
        kept = torch.nonzero(strengths > 0)[:, 0].tolist()
    part = equations.only(kept)
    values = chances(part, System(design[:, kept]), target, range(len(kept)))
    return dict.fromkeys(equations.names, 1.0) | {part.names[i]: p for i, p in values.items()}


def _measure(given: Asked) -> Callable[[Sequence[int]], float]:
    """A function from columns to what they explain alone."""
    factor, count = given.equations.factor(), len(given.equations.names)
    targets = factor[:, count:]

    def measure(columns: Sequence[int]) -> float:
        system = System(factor[:, list(columns)])
        solve = system.solve_nonnegative if given.nonnegative else system.solve
        return explained(system.design, solve(targets), targets) if columns else 0.0

    return measure
