"""How much a regularizer's column would explain if its entries belonged to other weights."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tacit.equations.candidates import CHUNK, BoundCandidates
from tacit.equations.equations import Equations
from tacit.equations.rows import read_rows, write_blocks
from tacit.equations.target import Target, endpoint_target, origin_of
from tacit.errors import InputError, check_choice, check_whole
from tacit.fitting.chance import EQUAL
from tacit.fitting.fits import Fit
from tacit.fitting.solving import System
from tacit.objective.params import Params, shorten
from tacit.objective.ranks import check_alone

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
    check_alone(origin.setting.ranks, "null_distribution", shards_only=True)
    if origin.setting.mode != "endpoint":
        raise InputError(
            f"the fit is of {origin.setting.mode} equations: null_distribution is for endpoints."
        )
    if fit.psd or fit.equations.bounded(nonnegative=fit.nonnegative).any():
        raise InputError("the fit is under λ ≥ 0 or Λ ⪰ 0: pass the free fit, fit.unconstrained.")
    check_whole("shuffles", shuffles)
    check_choice("kind", kind, get_args(NullKind))
    check_whole("seed", seed, least=0)
    bound = origin.bind()
    names = bound.columns.names
    if name not in names:
        raise InputError(f"name is {name!r}: pass that of one column; there are {shorten(names)}.")
    column = names.index(name)
    _check_entries(bound)
    if target is None:
        target = endpoint_target(origin.setting.objective, params=bound.params)
    groups = target.points[0].vectors
    vector = {n: torch.stack([group[n] for group in groups]).mean(0) for n in groups[0]}
    reduced = _fit_without(bound, vector, column)
    strength, in_fit = reduced.strength, fit.strengths[name]
    if abs(strength - in_fit) > 1e-4 * max(abs(strength), abs(in_fit)):
        raise InputError(
            f"recomputed, the strength of {name!r} is {strength:.6g} and not {in_fit:.6g}: the "
            "data has changed since the equations were written, or target= is another one."
        )
    products = torch.zeros(shuffles, reduced.to_basis.shape[1] + 2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for tensor_name in bound.rows:
        if column in bound.columns.active.get(tensor_name, ()):
            values, others = _read_tensor(tensor_name, bound, vector, reduced)
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


def _check_entries(bound: BoundCandidates) -> None:
    """Refuse equations that are not of single entries."""
    if projected := [n for n in bound.rows if bound.subspace(n) is not None]:
        raise InputError(
            f"{shorten(projected)} has a low rank or equal largest singular values, and its "
            "equations are along the directions in which all candidates have a gradient: their "
            "entries cannot be drawn one by one. Leave penalties of singular values, such as "
            "nuclear_norm, out."
        )


class _FitWithout(NamedTuple):
    """The fit of all columns but one."""

    column: int
    others: list[int]
    to_basis: Tensor
    """T such that others · T is an orthonormal basis Q of the other columns."""
    strengths: Tensor
    explained: float
    strength: float
    """Of the column, in the fit with it."""
    observed: float
    """The explained fraction of the fit with the column."""
    target_square_norm: float


def _fit_without(bound: BoundCandidates, vector: Params, column: int) -> _FitWithout:
    names = bound.columns.names
    blocks = write_blocks(bound, [vector], floors=dict.fromkeys(bound.params, 0.0))
    factor = Equations(bound.families, names, 1, tuple(blocks), ()).factor()
    target, square_norm = factor[:, -1:], float(factor[:, -1].square().sum())
    others = [c for c in range(len(names)) if c != column]
    systems = System(factor[:, others]), System(factor[:, :-1])
    solutions = [system.solve(target) for system in systems]
    explained, observed = (
        float((system.design @ strengths).square().sum()) / (square_norm or 1.0)
        for system, strengths in zip(systems, solutions, strict=True)
    )
    basis, strengths = systems[0].coordinates, solutions[0][:, 0]
    strength = float(solutions[1][column, 0])
    return _FitWithout(column, others, basis, strengths, explained, strength, observed, square_norm)


def _read_tensor(
    name: str, bound: BoundCandidates, target: Params, reduced: _FitWithout
) -> tuple[Tensor, Tensor]:
    """One tensor's rows of the column, and of [basis of the other columns | their residual]."""
    part = slice(0, bound.params[name].numel())
    design, values, kinks = read_rows(bound, name, part, [target])
    wide = values.new_zeros(len(values), len(bound.columns.names))
    wide[:, list(bound.columns.active[name])] = design.to(values)
    column, others = wide[:, reduced.column], wide[:, reduced.others]
    residual = values - (others @ reduced.strengths.to(values))[:, None]
    beside = torch.cat([others @ reduced.to_basis.to(values), residual], dim=1)
    if kinks is not None:
        column, beside = column[~kinks], beside[~kinks]
    return column.cpu(), beside.cpu()


def _add_products(
    products: Tensor, values: Tensor, others: Tensor, kind: NullKind, generator: torch.Generator
) -> None:
    """Add one tensor's inner products of every draw with the other columns and with itself."""
    if not len(values):  # all rows are at kinks
        return
    for part in products.split(max(1, CHUNK // len(values))):
        if kind == "direction":
            drawn = torch.randn(len(part), len(values), generator=generator, dtype=values.dtype)
        else:
            orders = [torch.randperm(len(values), generator=generator) for _ in part]
            drawn = values[torch.stack(orders)]
        part[:, :-1] += drawn @ others
        part[:, -1] += drawn.square().sum(1)
