"""Least squares on the small factor, with the rank decided on columns of unit norm."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

RANK = 1e-12
"""Singular values of the unit-norm design below this part of the largest count as zero."""


@dataclass(frozen=True, eq=False)
class System:
    """A design, through the singular values of its columns scaled to unit norm."""

    design: Tensor

    @cached_property
    def norms(self) -> Tensor:
        """Norms of the columns; zero where a regularizer has no gradient."""
        return self.design.norm(dim=0)

    @cached_property
    def nonzero(self) -> Tensor:
        """Indices of the columns that are not zero."""
        return torch.nonzero(self.norms > 0)[:, 0]

    @cached_property
    def unit(self) -> Tensor:
        """The columns that are not zero, scaled to unit norm."""
        return self.design[:, self.nonzero] / self.norms[self.nonzero]

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(self.unit, full_matrices=True)
        return u, torch.cat([s, s.new_zeros(vh.shape[0] - len(s))]), vh

    @cached_property
    def rank(self) -> int:
        """How many combinations of the strengths the equations determine."""
        _, s, _ = self._svd
        return int((s > RANK * s[0]).sum()) if len(s) else 0

    @cached_property
    def condition(self) -> float:
        """Condition number of the unit columns; infinite if they are linearly dependent."""
        _, s, _ = self._svd
        if not len(s):
            return math.inf
        return float(s[0] / s[-1]) if self.rank == len(s) else math.inf

    @cached_property
    def inflation(self) -> Tensor:
        """Variance inflation, diag (ZᵀZ)⁻¹ for unit columns Z; infinite where undetermined."""
        _, s, vh = self._svd
        determined = (vh[: self.rank].T / s[: self.rank]).square().sum(1)
        undetermined = vh[self.rank :].T.norm(dim=1) > 1e-6
        full = torch.full_like(self.norms, math.inf)
        full[self.nonzero] = torch.where(undetermined, math.inf, determined)
        return full

    @cached_property
    def cosines(self) -> Tensor:
        """Cosines between columns; zero for columns that are zero."""
        full = self.design.new_zeros(len(self.norms), len(self.norms))
        full[self.nonzero[:, None], self.nonzero] = self.unit.T @ self.unit
        return full

    @cached_property
    def unique_directions(self) -> Tensor:
        """The part of each column orthogonal to the others, at unit norm; zero if there is none."""
        u, s, vh = self._svd
        rank = self.rank
        # Column k of the pseudoinverse is orthogonal to all columns except column k.
        dual = (u[:, :rank] / s[:rank]) @ vh[:rank]
        full = self.design.new_zeros(len(self.design), len(self.norms))
        full[:, self.nonzero] = dual / dual.norm(dim=0).clamp_min(torch.finfo(dual.dtype).tiny)
        full[:, torch.isinf(self.inflation)] = 0
        return full

    @cached_property
    def coordinates(self) -> Tensor:
        """T such that design · T is an orthonormal basis of the design's columns."""
        _, s, vh = self._svd
        full = self.design.new_zeros(len(self.norms), self.rank)
        scaled = vh[: self.rank].T / s[: self.rank]
        full[self.nonzero] = scaled / self.norms[self.nonzero, None]
        return full

    def cancelling(self, condition: float = math.inf) -> Tensor:
        """Combinations of unit columns that cancel, one per row, each of few columns.

        With an infinite condition these are the ones that cancel exactly; otherwise those that
        cancel up to one part in `condition` but not exactly. The largest coefficient of each is 1.
        """
        _, s, vh = self._svd
        exact = math.isinf(condition)
        first = self.rank if exact else int((s * condition >= s[:1]).sum())
        end = len(s) if exact else max(first, self.rank)
        full = self.design.new_zeros(end - first, len(self.norms))
        full[:, self.nonzero] = _echelon(vh[first:end])
        return full

    @property
    def determined_condition(self) -> float:
        """Condition number over the combinations of strengths that are determined."""
        _, s, _ = self._svd
        return float(s[0] / s[self.rank - 1]) if self.rank else math.inf

    def solve(self, targets: Tensor) -> Tensor:
        """Least-squares strengths for every target; of least norm if columns are dependent."""
        u, s, vh = self._svd
        rank = self.rank
        # The equations determine vh[:rank] · (norms · λ) = projected.
        projected = (u.T @ targets)[:rank] / s[:rank, None]
        norms = self.norms[self.nonzero]
        full = targets.new_zeros(len(self.norms), targets.shape[1])
        if rank == len(s):
            full[self.nonzero] = (vh.T @ projected) / norms[:, None]
        else:
            q, r = torch.linalg.qr((vh[:rank] * norms).T)
            full[self.nonzero] = q @ torch.linalg.solve_triangular(r.T, projected, upper=False)
        return full

    def determines(self, combinations: Tensor) -> Tensor:
        """Which combinations Σ_j a_j λ_j of strengths the equations determine, one per row."""
        _, _, vh = self._svd
        scaled = combinations[:, self.nonzero] / self.norms[self.nonzero]
        undetermined = (scaled @ vh[self.rank :].T).norm(dim=1) > 1e-6 * scaled.norm(dim=1)
        return ~undetermined & ~combinations[:, self.norms == 0].any(1)

    def solve_bounded(self, targets: Tensor, bounded: Tensor) -> Tensor:
        """Least-squares strengths for every target, under λ_j ≥ 0 for the bounded ones.

        What the others explain is projected out first: min over them leaves a problem in the
        bounded ones alone.
        """
        if not bounded.any():
            return self.solve(targets)
        if bounded.all():
            return self.solve_nonnegative(targets)
        others, strengths = (
            System(self.design[:, ~bounded]),
            targets.new_zeros(len(self.norms), targets.shape[1]),
        )
        basis = others.design @ others.coordinates
        design = self.design[:, bounded] - basis @ (basis.T @ self.design[:, bounded])
        # A column that the others span has no part of its own; rounding would give it one.
        spanned = design.norm(dim=0) <= RANK * self.norms[bounded]
        rest = System(torch.where(spanned, 0.0, design))
        strengths[bounded] = rest.solve_nonnegative(targets - basis @ (basis.T @ targets))
        strengths[~bounded] = others.solve(targets - self.design[:, bounded] @ strengths[bounded])
        return strengths

    def solve_nonnegative(self, targets: Tensor) -> Tensor:
        """Least-squares strengths under λ ≥ 0 for every target, by active sets."""
        from scipy.optimize import nnls

        full = targets.new_zeros(len(self.norms), targets.shape[1])
        unit = self.unit.numpy()
        for column in range(targets.shape[1]) if len(self.nonzero) else ():  # nnls needs a column
            scaled, _ = nnls(unit, targets[:, column].numpy())
            full[self.nonzero, column] = (
                torch.from_numpy(np.asarray(scaled)) / self.norms[self.nonzero]
            )
        return full


def explained(design: Tensor, strengths: Tensor, targets: Tensor) -> float:
    """The explained fraction of the targets' squared norm, ⟨design·λ, target⟩/‖target‖².

    With independent groups of draws (one column of strengths and of targets each), the strengths
    of one group are combined with the target of another, so that the draws' noise cancels on
    average.
    """
    whole = between_groups(targets, targets)
    return between_groups(design @ strengths, targets) / whole if whole > 0 else 0.0


def between_groups(a: Tensor, b: Tensor) -> float:
    """Σ ⟨a_g, b_h⟩ over columns g ≠ h of different groups; ⟨a, b⟩ if there is one group."""
    if a.shape[1] == 1:
        return float((a * b).sum())
    return float(a.sum(1) @ b.sum(1) - (a * b).sum())


def _echelon(rows: Tensor) -> Tensor:
    """The reduced echelon form of the rows, scaled so that the largest entry of each is 1."""
    rows = rows.clone()
    for step in range(len(rows)):
        best = int(rows[step:].abs().argmax())
        line, pivot = step + best // rows.shape[1], best % rows.shape[1]
        rows[[step, line]] = rows[[line, step]]
        rows[step] /= rows[step, pivot].clone()
        others = torch.arange(len(rows)) != step
        rows[others] -= rows[others, pivot, None] * rows[step]
    peaks = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    return rows / peaks
