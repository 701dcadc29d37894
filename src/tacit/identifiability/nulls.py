"""How much a regularizer's column would explain if its entries belonged to other weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tacit.equations.endpoint import endpoint_target
from tacit.equations.equations import Equations
from tacit.equations.rows import CHUNK, BoundCandidates, read_rows, write_blocks
from tacit.equations.target import Origin, Target, origin_of
from tacit.errors import InputError
from tacit.fitting.chance import EQUAL
from tacit.fitting.fits import Fit
from tacit.fitting.solving import System
from tacit.objective.params import Params, shorten

NullKind = Literal["permutation", "direction"]


@dataclass(frozen=True)
class Null:
    """The fraction explained with a column as it is, and with random ones in its place."""

    name: str
    kind: NullKind
    observed: float
    """The explained fraction with the column as it is."""
    without: float
    """The explained fraction without the column."""
    draws: tuple[float, ...] = field(repr=False)
    """The explained fraction with each random column in its place."""

    @property
    def p_value(self) -> float:
        """(1 + number of draws that explain as much) / (1 + number of draws)."""
        as_much = sum(draw >= self.observed - EQUAL for draw in self.draws)
        return (1 + as_much) / (1 + len(self.draws))


def null_distribution(
    fit: Fit,
    name: str,
    *,
    target: Target | None = None,
    shuffles: int = 999,
    kind: NullKind = "permutation",
    seed: int = 0,
) -> Null:
    """How much would be explained if one column's entries belonged to other weights.

    "permutation" shuffles the column within each tensor: its values stay, but belong to other
    weights. A column explains more than its permutations only where it is aligned, weight by
    weight, with what the other columns leave unexplained. "direction" draws Gaussian entries in
    the tensors that the column covers; `chance` gives the distribution of that null in closed form
    (by whole layers).

    Trap: permutations keep the mean of each tensor, so it is not tested. A column that is constant
    in each tensor explains as much in any order and has p-value 1.

    One pass over the data, then shuffles × parameters × columns operations, one tensor at a time.

    Args:
        fit: a fit of endpoint equations at one point, unconstrained.
        name: the column whose entries are drawn; the other columns stay as they are.
        target: the target of the fit, which saves the pass over the data.
        shuffles: number of draws.
        kind: "permutation" or "direction".
        seed: seed of the draws; they depend on nothing else.

    >>> import tacit
    >>> X, y = torch.eye(9).double(), torch.arange(1.0, 10.0).double()[:, None]
    >>> model = torch.nn.Linear(9, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(y.T / 1.9)  # the optimum of mse_loss + 0.1 ‖θ‖²
    >>> fit = tacit.estimate(model, torch.nn.functional.mse_loss, (X, y), [tacit.l2()])
    >>> null = null_distribution(fit, "l2")
    >>> round(null.observed, 12), null.p_value
    (1.0, 0.001)
    """
    origin = origin_of(fit, "null_distribution")
    _check_arguments(fit, origin, shuffles, kind, seed)
    bound = origin.bind()
    if name not in bound.columns.names:
        raise InputError(
            f"name is {name!r}: pass the name of one column; there are "
            f"{shorten(bound.columns.names)}."
        )
    column = bound.columns.names.index(name)
    if target is None:
        target = endpoint_target(origin.setting.objective, params=bound.params)
    vector = target.points[0].vectors[0]
    reduced = _fit_without(bound, vector, column)
    if abs(reduced.observed - fit.explained) > 1e-6:
        raise InputError(
            f"recomputed, the fit explains {reduced.observed:.6g} and not {fit.explained:.6g}: the "
            "data has changed since the equations were written, or target= is another one."
        )
    products = torch.zeros(shuffles, reduced.to_basis.shape[1] + 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for tensor_name in bound.rows:
        if column in bound.columns.active.get(tensor_name, ()):
            values, others = _read_tensor(tensor_name, bound, vector, reduced)
            if len(values):
                _add_products(products, values, others, kind, generator)
    # A column φ adds ⟨φ, e⟩²/φᵀMφ, where e is the part of the target that the other columns do
    # not explain, and M the projection that removes them: φᵀMφ = ‖φ‖² − ‖Qᵀφ‖², with Q an
    # orthonormal basis of the other columns.
    inside, along_residual, square = products[:, :-2], products[:, -2], products[:, -1]
    outside = square - inside.square().sum(1)
    added = torch.where(outside > EQUAL * square, along_residual.square() / outside, 0.0)
    scale = reduced.target_square_norm or 1.0
    draws = reduced.explained + (added / scale).clamp(max=1 - reduced.explained)
    return Null(name, kind, reduced.observed, reduced.explained, tuple(draws.tolist()))


class _FitWithout(NamedTuple):
    """The fit of all columns but one."""

    column: int
    others: list[int]
    to_basis: Tensor
    """T such that others · T is an orthonormal basis Q of the other columns."""
    strengths: Tensor
    explained: float
    observed: float
    """The explained fraction of the fit with the column."""
    target_square_norm: float


def _fit_without(bound: BoundCandidates, target: Params, column: int) -> _FitWithout:
    blocks = write_blocks(bound, [target], floors=dict.fromkeys(bound.params, 0.0))
    names = bound.columns.names
    factor = Equations(bound.families, names, 1, tuple(blocks), ()).factor()
    target_column, square_norm = factor[:, -1:], float(factor[:, -1].square().sum())
    others = [c for c in range(len(names)) if c != column]

    def explained(system: System) -> float:
        if not square_norm or not len(system.nonzero):
            return 0.0
        return float((system.design @ system.solve(target_column)).square().sum()) / square_norm

    reduced, full = System(factor[:, others]), System(factor[:, :-1])
    strengths, to_basis = factor.new_zeros(len(others)), factor.new_zeros(len(others), 0)
    if len(reduced.nonzero):
        strengths, to_basis = reduced.solve(target_column)[:, 0], reduced.coordinates
    return _FitWithout(
        column, others, to_basis, strengths, explained(reduced), explained(full), square_norm
    )


def _read_tensor(
    name: str, bound: BoundCandidates, target: Params, reduced: _FitWithout
) -> tuple[Tensor, Tensor]:
    """One tensor's rows of the column, and of [basis of the other columns | their residual]."""
    part = slice(0, bound.params[name].numel())
    design, values, kinks = read_rows(bound, name, part, [target])
    residual, active = values[:, 0], bound.columns.active[name]
    design = design.to(residual)
    others = residual.new_zeros(len(residual), len(reduced.others))
    positions = [i for i, c in enumerate(active) if c != reduced.column]
    others[:, [reduced.others.index(active[i]) for i in positions]] = design[:, positions]
    residual = residual - others @ reduced.strengths.to(residual)
    beside = torch.cat([others @ reduced.to_basis.to(residual), residual[:, None]], dim=1)
    column = design[:, active.index(reduced.column)]
    if kinks is not None:
        column, beside = column[~kinks], beside[~kinks]
    return column.cpu(), beside.cpu()


def _add_products(
    products: Tensor, values: Tensor, others: Tensor, kind: NullKind, generator: torch.Generator
) -> None:
    """Add one tensor's inner products of every draw with the other columns and with itself."""
    for part, drawn in _random_columns(values, len(products), kind, generator):
        products[part, :-1] += drawn @ others
        products[part, -1] += drawn.square().sum(1)


def _random_columns(
    values: Tensor, count: int, kind: NullKind, generator: torch.Generator
) -> Iterator[tuple[slice, Tensor]]:
    """Random columns (draws, rows) in place of one, a slice of the draws at a time."""
    height = max(1, CHUNK // len(values))
    for start in range(0, count, height):
        part = slice(start, min(start + height, count))
        size = (part.stop - start, len(values))
        if kind == "direction":
            yield part, torch.randn(size, generator=generator, dtype=values.dtype)
        else:
            orders = [torch.randperm(len(values), generator=generator) for _ in range(size[0])]
            yield part, values[torch.stack(orders)]


def _check_arguments(fit: Fit, origin: Origin, shuffles: Any, kind: Any, seed: Any) -> None:
    if fit.nonnegative:
        raise InputError("the fit is under λ ≥ 0: pass the free fit, fit.unconstrained.")
    if origin.setting.mode != "endpoint":
        raise InputError(
            f"the fit is of {origin.setting.mode} equations: null_distribution is for endpoint "
            "equations."
        )
    for name, number, least in (("shuffles", shuffles, 1), ("seed", seed, 0)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise InputError(f"{name} is {number!r}: pass a whole number, at least {least}.")
    if kind not in get_args(NullKind):
        raise InputError(f"kind is {kind!r}: pass 'permutation' or 'direction'.")
