"""How probably a random direction would explain as much as a column does."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.fitting.shares import equations_of
from tacit.fitting.solving import System

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit

EXACT, EQUAL = 1e-12, 1e-9
"""Parts of the target below EXACT are rounding; explained parts within EQUAL count as equal."""


def chance(fit: "Fit | Equations") -> dict[str, float]:
    """For every column, the probability that a random direction adds as much as the column does.

    This is the p-value of what a column adds beside the others, where the null hypothesis replaces
    the column by a direction drawn uniformly in the layers where it is not zero. It is exact for
    any target, and does not assume that parameters are independent. It is 1 for a column that adds
    nothing.

    Trap: a small value says that the direction is not an accident, not that its penalty was
    applied. `null_distribution` has a null hypothesis that keeps the sizes of the column's entries.
    """
    equations, nonnegative, _ = equations_of(fit, "chance")
    factor, count = equations.factor(), len(equations.names)
    design, target = factor[:, :count], factor[:, count:].mean(1)
    free = list(range(count))
    if (bounded := equations.bounded(nonnegative=nonnegative)).any():
        strengths = System(design).solve_bounded(target[:, None], bounded)[:, 0]
        free = torch.nonzero((strengths > 0) | ~bounded)[:, 0].tolist()
    by_column = chances_among(free, equations, design, target, judged=free)
    return {name: by_column.get(i, 1.0) for i, name in enumerate(equations.names)}


def chances_among(
    columns: list[int], equations: Equations, design: Tensor, target: Tensor, judged: Iterable[int]
) -> dict[int, float]:
    """`chances` of the judged ones of these columns, as if there were no others."""
    part, system = equations.select_columns(columns), System(design[:, columns])
    places = [columns.index(column) for column in judged if column in columns]
    return {columns[i]: p for i, p in chances(part, system, target, places).items()}


def chances(
    equations: Equations, system: System, target: Tensor, columns: Iterable[int]
) -> dict[int, float]:
    """The probabilities of `chance` for some columns of a system, by index.

    Let e be the part of the target that the other columns do not explain, and M the projection that
    removes the other columns. A direction φ adds (φᵀe)²/φᵀMφ to what is explained. For φ uniform in
    all p rows, Mφ/‖Mφ‖ is uniform on a sphere in p − rank + 1 dimensions, so this is ‖e‖² times a
    Beta(½, (p − rank)/2) for any target. For φ uniform in the layers where the column is not zero,
    it is a ratio of quadratic forms, whose distribution is exact too.
    """
    blocks = equations.blocks
    blocks_of = {c: tuple(i for i, b in enumerate(blocks) if c in b.columns) for c in columns}
    length = float(target.norm())
    if not length:
        return dict.fromkeys(blocks_of, 1.0)
    basis = system.design @ system.coordinates
    target_in_basis = basis.T @ target / length
    rows = {
        indices: _rows_of(equations, indices, system, target_in_basis, length)
        for indices in set(blocks_of.values())
    }
    return {
        c: _probability(rows[indices], basis.T @ system.unique_directions[:, c])
        for c, indices in blocks_of.items()
    }


def family_chances(
    equations: Equations, system: System, target: Tensor
) -> dict[tuple[int, ...], float]:
    """For each curve, by its columns, the probability that as many random directions add as much.

    Of what the other columns leave, m random directions explain a part that is distributed as
    Beta(m/2, n/2), with n rows more than the rank of all columns. The rows are those of the layers
    where the curve has weights.
    """
    chances, start = {}, 0
    for family in equations.families:
        columns = tuple(range(start, start + family.size))
        start += family.size
        if family.kind == "spline":
            chances[columns] = _family_chance(equations, system, target, columns)
    return chances


def _family_chance(
    equations: Equations, system: System, target: Tensor, columns: tuple[int, ...]
) -> float:
    from scipy.special import betainc

    others = System(
        system.design[:, [c for c in range(system.design.shape[1]) if c not in columns]]
    )
    strengths = system.solve(target[:, None])[:, 0]
    left = target - others.design @ others.solve(target[:, None])[:, 0]
    added = left.square().sum() - (target - system.design @ strengths).square().sum()
    blocks = tuple(b for b in equations.blocks if set(columns) & set(b.columns))
    factor, count = replace(equations, blocks=blocks).factor(), len(strengths)
    residual = factor[:, count:].mean(1) - factor[:, :count] @ strengths
    freedom = sum(block.rows for block in blocks) - system.rank
    whole = float(added + residual.square().sum())
    if freedom <= 0 or whole <= EXACT**2 * float(target.square().sum()) or added <= 0:
        return 1.0
    part = float(residual.square().sum()) / whole
    return float(betainc(freedom / 2, (system.rank - others.rank) / 2, part))


class _Rows(NamedTuple):
    """The rows of some blocks, in coordinates that span all columns and the target."""

    basis: Tensor
    """An orthonormal basis of all columns, restricted to these rows."""
    target_in_basis: Tensor
    """Inner products of the basis with the whole target, which is scaled to unit norm."""
    residual: Tensor
    """The part of the target that no combination of columns explains, in these rows."""
    further_rows: int
    """How many more rows there are than coordinates."""


def _rows_of(
    equations: Equations,
    indices: tuple[int, ...],
    system: System,
    target_in_basis: Tensor,
    length: float,
) -> _Rows:
    part = replace(equations, blocks=tuple(equations.blocks[i] for i in indices))
    factor, count = part.factor(), len(equations.names)
    basis = factor[:, :count] @ system.coordinates
    residual = factor[:, count:].mean(1) / length - basis @ target_in_basis
    return _Rows(basis, target_in_basis, residual, max(0, part.rows - len(factor)))


def _probability(rows: _Rows, unique: Tensor) -> float:
    """P((φᵀe)² ≥ added² · φᵀMφ) for one column, given its unique direction in the basis.

    That is P(φᵀ(eeᵀ − added²·M)φ ≥ 0) for a Gaussian φ: eeᵀ − added²·M has one positive eigenvalue.
    """
    added = float(unique @ rows.target_in_basis)
    if abs(added) <= EXACT:
        return 1.0
    direction = rows.basis @ unique
    e = rows.residual + added * direction
    identity = torch.eye(len(direction), dtype=direction.dtype)
    M = identity - rows.basis @ rows.basis.T + direction.outer(direction)
    threshold = (1 - EQUAL) * added**2
    *negative, positive = torch.linalg.eigvalsh(e.outer(e) - threshold * M).tolist()
    sizes = torch.tensor(negative, dtype=direction.dtype).neg().clamp_min(0)
    return probability_exceeds(positive, sizes, threshold, rows.further_rows)


def probability_exceeds(scale: float, scales: Tensor, common: float, freedom: int) -> float:
    """P(scale·z² ≥ Σ scales_j z_j² + common·χ²), z standard normal, χ² with `freedom` degrees.

    P(z² ≥ x) = (2/π) ∫ exp(−x / 2 sin²θ) dθ over (0, π/2) (Craig 1991). The mean of the integrand
    over the right-hand side is a product of its terms' moment generating functions, which leaves
    one integral without cancellation.
    """
    if scale <= 0:
        return 0.0
    sin_squared, weights = _quadrature()
    ratios = scales.numpy()[:, None] / scale
    logs = np.log1p(ratios / sin_squared).sum(0) + freedom * np.log1p(common / scale / sin_squared)
    return min(1.0, float((weights * np.exp(-logs / 2)).sum()))


@cache
def _quadrature(count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """sin²θ at nodes in (0, π/2), and weights of a mean over them."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    position = (nodes + 1) / 2
    # More nodes near θ = 0, where the integrand changes fast if the right-hand side is small.
    return np.sin(np.pi / 2 * position**3) ** 2, 1.5 * position**2 * weights
