"""What a fit found, before it is judged."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.equations import Equations
from tacit.solving import System


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
