"""What each regularizer adds to the explained fraction, and which columns a name refers to."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tacit.equations.blocks import Block
from tacit.equations.equations import Equations
from tacit.errors import InputError
from tacit.fitting.semidefinite import solver
from tacit.fitting.solving import System, explained
from tacit.objective.params import shorten

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit


class FittedSystem(NamedTuple):
    """Equations, and whether their strengths are fitted under λ ≥ 0, or their Λ under Λ ⪰ 0."""

    equations: Equations
    nonnegative: bool
    psd: bool = False


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
    system = equations_of(fit, "unique_shares", refits_families=True)
    all_columns, fraction = range(len(system.equations.names)), explained_by(system)
    whole = fraction(all_columns)
    return {
        label: whole - fraction([c for c in all_columns if c not in columns])
        for label, columns in column_groups(system.equations).items()
    }


def ordered_shares(fit: "Fit | Equations", order: Sequence[str] | None = None) -> dict[str, float]:
    """What each regularizer adds to the explained fraction when they enter in this order.

    They sum to the explained fraction. The first gets all that it can explain, the last only what
    is unique to it. The default is the order of the equations. Names are those of `unique_shares`.
    """
    system = equations_of(fit, "ordered_shares", refits_families=True)
    groups = column_groups(system.equations)
    order = list(groups) if order is None else order
    columns_of(system.equations, order, what="order")
    if set(order) != set(groups):
        raise InputError(
            f"order is {shorten(order)}: it needs every regularizer once, which are "
            f"{shorten(groups)}."
        )
    fraction, shares, before, columns = explained_by(system), {}, 0.0, []
    for label in order:
        columns += groups[label]
        after = fraction(columns)
        shares[label], before = after - before, after
    return shares


def explained_by(system: FittedSystem) -> Callable[[Sequence[int]], float]:
    """A function from columns to the fraction that they explain by themselves."""
    factor, names = system.equations.factor(), system.equations.names
    targets, products = factor[:, len(names) :], products_of_points(system.equations)

    def fraction(columns: Sequence[int]) -> float:
        if not columns:
            return 0.0
        part = System(factor[:, list(columns)])
        columns_of_part = system.equations.select_columns(columns)
        solve = solver(part, columns_of_part, nonnegative=system.nonnegative, psd=system.psd)
        strengths = solve(targets)
        if products is None:
            return explained(part.design, strengths, targets)
        return float(net_shares(products[[*columns, -1]][:, [*columns, -1]], strengths[:, 0]).sum())

    return fraction


def products_of_points(equations: Equations, layer: str | None = None) -> Tensor | None:
    """Inner products of [design | target] of different points; None where they are not known.

    Points are every second epoch of a run, or every second of a few steps. Their noise is
    independent, so that products of different points have none on average. From √m times the mean
    over m points, C, and the points' own factors F_i,

        Σ_{i≠j} F_iᵀF_j / (m−1) = (m CᵀC − Σ_i F_iᵀF_i) / (m−1),

    which is Σ_i F_iᵀF_i if all points are the same.

    Args:
        equations: with `Equations.means`, for all of its sources.
        layer: only of this layer; by default of all.
    """
    epoch = [source.epoch for source in equations.sources]
    size = len(equations.names) + equations.targets
    total, members = torch.zeros(size, size, dtype=torch.float64), {}
    for mean in equations.means:
        for i in range(mean.points):
            later = (2 * i, 0) if epoch[mean.source] else (0, 2 * i)
            key = mean.source + later[0], mean.step + later[1]
            members[mean.layer, *key] = mean.points
        if layer in (None, mean.layer):
            _add_products(total, mean, mean.points / (mean.points - 1))
    if {source for _, source, _ in members} != {block.source for block in equations.blocks}:
        return None
    for block in equations.blocks:
        points = members.get((block.layer, block.source, block.step))
        if points and layer in (None, block.layer):
            _add_products(total, block, -1 / (points - 1))
    return total


def _add_products(total: Tensor, block: Block, weight: float) -> None:
    """Add a block's inner products, times the weight."""
    width = len(total) - (block.factor.shape[1] - len(block.columns))
    columns = torch.tensor([*block.columns, *range(width, len(total))])
    total[columns[:, None], columns] += weight * block.factor.T @ block.factor


def net_shares(products: Tensor, strengths: Tensor) -> Tensor:
    """⟨λ_k φ_k, target⟩ / ‖target‖² from products of different points; their sum is at most 1.

    They are zero if the points do not agree on a target.
    """
    whole, parts = float(products[-1, -1]), strengths * products[:-1, -1]
    return parts / max(whole, float(parts.sum())) if whole > 0 else torch.zeros_like(parts)


def equations_of(
    fit: "Fit | Equations", what: str, *, refits_families: bool = False
) -> FittedSystem:
    """The equations of a fit, or the given equations.

    Λ ⪰ 0 can be kept only where whole families are fitted again; else such a fit is refused.
    """
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
    psd = getattr(fit, "psd", False)
    if psd and not refits_families:
        raise InputError(f"the fit is under Λ ⪰ 0: pass {what} the free fit, fit.unconstrained.")
    return FittedSystem(equations, getattr(fit, "nonnegative", False), psd)


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
