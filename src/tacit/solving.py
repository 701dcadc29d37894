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
        """Norms of the columns, zero where a regularizer has no gradient at all."""
        return self.design.norm(dim=0)

    @cached_property
    def seen(self) -> Tensor:
        """Which columns are not zero."""
        return torch.nonzero(self.norms > 0)[:, 0]

    @cached_property
    def unit(self) -> Tensor:
        """The columns that are not zero, at unit norm."""
        return self.design[:, self.seen] / self.norms[self.seen]

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
        """Condition number at unit norm; infinite where rank is lost."""
        _, s, _ = self._svd
        if not len(s):
            return math.inf
        return float(s[0] / s[-1]) if self.rank == len(s) else math.inf

    @cached_property
    def inflation(self) -> Tensor:
        """Variance inflation, diag (ZᵀZ)⁻¹ for unit columns Z; infinite where undetermined."""
        _, s, vh = self._svd
        kept = (vh[: self.rank].T / s[: self.rank]).square().sum(1)
        lost = vh[self.rank :].T.norm(dim=1) > 1e-6
        full = torch.full_like(self.norms, math.inf)
        full[self.seen] = torch.where(lost, math.inf, kept)
        return full

    @cached_property
    def cosines(self) -> Tensor:
        """Cosines between columns; zero for columns that vanish."""
        full = self.design.new_zeros(len(self.norms), len(self.norms))
        full[self.seen[:, None], self.seen] = self.unit.T @ self.unit
        return full

    @cached_property
    def weakest(self) -> Tensor:
        """The combination of unit columns nearest to cancelling; all that cancel, one a row."""
        _, s, vh = self._svd
        first = max(0, min(self.rank, len(s) - 1))
        full = self.design.new_zeros(len(s) - first, len(self.norms))
        full[:, self.seen] = vh[first:]
        return full

    def solve(self, targets: Tensor) -> Tensor:
        """Least-squares strengths for every target; of least norm where rank is lost."""
        u, s, vh = self._svd
        rank = self.rank
        # What the equations determine: vh[:rank] · (norms · λ) = projected.
        projected = (u.T @ targets)[:rank] / s[:rank, None]
        norms = self.norms[self.seen]
        full = targets.new_zeros(len(self.norms), targets.shape[1])
        if rank == len(s):
            full[self.seen] = (vh.T @ projected) / norms[:, None]
        else:
            q, r = torch.linalg.qr((vh[:rank] * norms).T)
            full[self.seen] = q @ torch.linalg.solve_triangular(r.T, projected, upper=False)
        return full

    def solve_nonnegative(self, targets: Tensor) -> Tensor:
        """The same under λ ≥ 0, by active sets."""
        from scipy.optimize import nnls

        full = targets.new_zeros(len(self.norms), targets.shape[1])
        unit = self.unit.numpy()
        for column in range(targets.shape[1]):
            found, _ = nnls(unit, targets[:, column].numpy())
            full[self.seen, column] = torch.from_numpy(np.asarray(found)) / self.norms[self.seen]
        return full
