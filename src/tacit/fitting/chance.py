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


def chance(found: "Fit | Equations") -> dict[str, float]:
    """For every column, how probably a random direction in its place would add as much as it does.

    The p-value of what a column adds beside the others, under the null of a direction drawn
    uniformly in the layers where the column is not zero: exact, whatever the target is, and without
    any assumption that parameters are independent. 1 where a column adds nothing. It says that a
    direction is no accident, not that its penalty was at work: see `null_distribution` for a null
    that keeps the column's sizes.
    """
    equations, nonnegative = equations_of(found, "chance")
    factor, count = equations.factor(), len(equations.names)
    design, target = factor[:, :count], factor[:, count:].mean(1)
    kept = list(range(count))
    if nonnegative:
        strengths = System(design).solve_nonnegative(target[:, None])[:, 0]
        kept = torch.nonzero(strengths > 0)[:, 0].tolist()
    part = equations.select_columns(kept)
    values = chances(part, System(design[:, kept]), target, range(len(kept)))
    return dict.fromkeys(equations.names, 1.0) | {part.names[i]: p for i, p in values.items()}


EXACT, EQUAL = 1e-12, 1e-9
"""Parts of the target below the first are rounding; explained parts this near count as equal."""


def chances(
    equations: Equations, system: System, target: Tensor, columns: Iterable[int]
) -> dict[int, float]:
    """For each column, how probably a random direction in its place would add as much as it does.

    With e what the other columns leave of the target and M the projection off them, a direction φ
    adds (φᵀe)²/φᵀMφ. For φ uniform in all p rows that is ‖e‖² times a Beta(½, (p − rank)/2),
    whatever the target is: Mφ/‖Mφ‖ is uniform on a sphere in p − rank + 1 dimensions. For φ uniform
    in the layers where the column is not zero it is a ratio of quadratic forms, and exact too.
    """
    blocks = equations.blocks
    places = {c: tuple(i for i, b in enumerate(blocks) if c in b.columns) for c in columns}
    length = float(target.norm())
    if not length:
        return dict.fromkeys(places, 1.0)
    basis = system.design @ system.coordinates
    along = basis.T @ target / length
    parts = {p: _part(equations, p, system, along, length) for p in set(places.values())}
    return {
        c: _chance(parts[p], basis.T @ system.unique_directions[:, c]) for c, p in places.items()
    }


class _Part(NamedTuple):
    """The rows of some blocks, in coordinates where all columns and the target are."""

    basis: Tensor
    """Orthonormal combinations of all columns, cut down to these rows."""
    along: Tensor
    """Their inner products with the whole target, of unit norm."""
    left: Tensor
    """What all columns together leave of the target."""
    beyond: int
    """How many more rows there are than coordinates."""


def _part(
    equations: Equations, place: tuple[int, ...], system: System, along: Tensor, length: float
) -> _Part:
    part = replace(equations, blocks=tuple(equations.blocks[i] for i in place))
    factor, count = part.factor(), len(equations.names)
    basis = factor[:, :count] @ system.coordinates
    left = factor[:, count:].mean(1) / length - basis @ along
    return _Part(basis, along, left, max(0, part.rows - len(factor)))


def _chance(part: _Part, own: Tensor) -> float:
    """P((φᵀe)² ≥ added² · φᵀMφ) for one column, given the direction that it has to itself."""
    added = float(own @ part.along)
    if abs(added) <= EXACT:
        return 1.0
    mine = part.basis @ own
    rest = part.left + added * mine
    off = torch.eye(len(mine), dtype=mine.dtype) - part.basis @ part.basis.T + mine.outer(mine)
    enough = (1 - EQUAL) * added**2
    *down, up = torch.linalg.eigvalsh(rest.outer(rest) - enough * off).tolist()
    down = torch.tensor(down, dtype=mine.dtype).neg().clamp_min(0)
    return exceeds(up, down, enough, part.beyond)


def exceeds(up: float, down: Tensor, common: float, freedom: int) -> float:
    """P(up·z² ≥ Σ down_j z_j² + common·χ²), z standard normal, χ² of that many degrees of freedom.

    P(z² ≥ x) = (2/π) ∫ exp(−x / 2 sin²θ) dθ over (0, π/2) (Craig 1991), and the mean of that over
    the right-hand side is a product: one integral without cancellation, whatever the size.
    """
    if up <= 0:
        return 0.0
    sines, weights = _angles()
    falls = down.numpy()[:, None] / up
    logs = np.log1p(falls / sines).sum(0) + freedom * np.log1p(common / up / sines)
    return min(1.0, float((weights * np.exp(-logs / 2)).sum()))


@cache
def _angles(count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """sin²θ and weights of a mean over (0, π/2)."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    place = (nodes + 1) / 2
    # Nodes crowd at θ = 0, where the integrand of `exceeds` bends if the right side is small.
    return np.sin(np.pi / 2 * place**3) ** 2, 1.5 * place**2 * weights
