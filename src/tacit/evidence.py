"""What a fit found, before it is judged."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.equations import Equations
from tacit.solving import System, exceeds

EXPLAINED = 0.5
"""Fits that explain less than this are called unexplained."""
MATERIAL = 1e-3
"""Contributions below this part of the target are too small to speak of."""
EXACT, EQUAL = 1e-12, 1e-9
"""Parts of the target below the first are rounding; explained parts this near count as equal."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a fit found, before it is judged."""

    equations: Equations
    system: System
    strengths: Tensor
    targets: Tensor
    """One column a group of draws, in the rows of the factor."""
    explained: float
    residual_ratio: float
    free: Tensor | None
    """Strengths of the free fit, beside a nonnegative one."""

    @property
    def target(self) -> Tensor:
        """The mean over groups of draws."""
        return self.targets.mean(1)

    @property
    def noise(self) -> float:
        """Part of ‖target‖² that is the noise of the draws, from how far the groups disagree."""
        groups = self.targets.shape[1]
        if groups == 1 or not self.target.norm():
            return 0.0
        spread = (self.targets - self.target[:, None]).square().sum() / (groups * (groups - 1))
        return float(spread / self.target.square().sum())

    @property
    def adjusted(self) -> float:
        """The explained fraction beyond what as many arbitrary columns would explain of noise."""
        chance = min(1.0, self.system.rank / self.equations.rows)
        return (self.explained - chance) / (1 - chance) if chance < 1 else 0.0

    def contribution(self, strengths: Tensor) -> Tensor:
        """‖λ_k φ_k‖ / ‖target‖."""
        return strengths.abs() * self.system.norms / self.target.norm()

    @property
    def of_matrices(self) -> list[bool]:
        """Which columns are entries of a matrix Λ, whose single values mean little."""
        kinds = [family.kind for family in self.equations.families for _ in range(family.size)]
        return [kind in ("diagonal", "symmetric") for kind in kinds]

    @cached_property
    def chances(self) -> dict[str, float]:
        """How probably a random direction adds as much as a column does, matrices' entries apart.

        In a nonnegative fit beside those alone that are above zero; for the ones that are held at
        zero, what they would add to the free fit.
        """
        names = self.equations.names
        chosen = [i for i, matrix in enumerate(self.of_matrices) if not matrix]
        found = chances(self.equations, self.system, self.target, chosen)
        if self.free is not None:
            kept = torch.nonzero(self.strengths > 0)[:, 0].tolist()
            part, system = self.equations.only(kept), System(self.system.design[:, kept])
            places = [i for i, column in enumerate(kept) if column in found]
            above = chances(part, system, self.target, places)
            found |= {kept[i]: value for i, value in above.items()}
        return {names[i]: value for i, value in found.items()}

    def residuals(self) -> Tensor:
        """‖target − design·λ‖ / ‖target‖ over the layers where each column is not zero."""
        squares = torch.zeros_like(self.strengths)
        for block in self.equations.blocks:
            own, count = list(block.columns), len(block.columns)
            target = block.factor[:, count:].mean(1)
            left = target - block.factor[:, :count] @ self.strengths[own]
            squares[own] += left.square().sum()
        return squares.sqrt() / self.target.norm()

    def named(self, chosen: Tensor) -> tuple[str, ...]:
        """Names of the columns that a mask or list of indices chooses."""
        index = torch.nonzero(chosen)[:, 0] if chosen.dtype == torch.bool else chosen
        return tuple(self.equations.names[i] for i in index.tolist())


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
    return {c: _chance(parts[p], basis.T @ system.own[:, c]) for c, p in places.items()}


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
