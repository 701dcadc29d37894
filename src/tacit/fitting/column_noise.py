"""What the noise of columns from random probes does to strengths and residuals."""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.equations.noise import NoiseByBlock, Scatter, correct_factor, noise_by_block
from tacit.fitting.solving import System


class PartNoise(NamedTuple):
    """What is subtracted from the products of noisy columns, for each part of some equations."""

    noisy: tuple[int, ...]
    noises: Tensor
    """(parts, noisy, noisy)."""

    def correct(self, factors: Iterable[Tensor], targets: int = 1) -> Tensor:
        """The factors [design | targets] of as many parts, without the noise of their columns."""
        pairs = zip(factors, self.noises, strict=True)
        return torch.stack(
            [correct_factor(f, f.shape[1] - targets, self.noisy, noise) for f, noise in pairs]
        )

    @property
    def without_one(self) -> "PartNoise":
        """For each part, the noise of all others."""
        return PartNoise(self.noisy, self.noises.sum(0) - self.noises)

    @property
    def whole(self) -> "PartNoise":
        """The noise of all parts, as that of one."""
        return PartNoise(self.noisy, self.noises.sum(0, keepdim=True))


def block_noise(equations: Equations) -> NoiseByBlock | None:
    """The noise of every block; None where no column is noisy."""
    return noise_by_block(equations.blocks, equations.scatter())


def noise_by_label(
    equations: Equations, labels: Sequence[Hashable], *, skip_empty: bool = True
) -> PartNoise | None:
    """The noise of every label, of all its blocks, in the order in which labels appear.

    As in `factors_by_label`, blocks without equations are left out, unless `skip_empty` is False.
    """
    by_block = block_noise(equations)
    if by_block is None:
        return None
    totals: dict[Hashable, Tensor] = {}
    for label, block, noise in zip(labels, equations.blocks, by_block.noises, strict=True):
        if skip_empty and not (block.rows and block.columns):
            continue
        totals[label] = totals[label] + noise if label in totals else noise
    return PartNoise(by_block.noisy, torch.stack(list(totals.values())))


def probe_deviations(equations: Equations, scatter: Scatter, strengths: Tensor) -> Tensor:
    """How far each group of probes moves the strengths, (groups, strengths).

    Derivation. The strengths solve Aᵀ(t − Aλ) + Nλ = 0. With M = (AᵀA − N)⁻¹, group g moves them to
    first order by z_g/G, z_g = M[D_gᵀ(t − Aλ) − AᵀD_gλ], and the z_g are independent.

    Args:
        equations: what was fitted.
        scatter: of its columns.
        strengths: the fitted strengths.
    """
    count = len(equations.names)
    inverse = gram_inverse(System(equations.factor()[:, :count]))
    products = scatter.products
    along = products[:count].view(count, scatter.groups, -1)
    with_targets = products[count : count + equations.targets].mean(0).view(scatter.groups, -1)
    noisy = list(scatter.noisy)
    with_residual = with_targets - torch.einsum("k,kgm->gm", strengths, along)
    scores = -torch.einsum("kgm,m->gk", along, strengths[noisy])
    scores[:, noisy] += with_residual
    return scores @ inverse


def gram_inverse(system: System) -> Tensor:
    """(ΦᵀΦ)⁻¹ of the determined strengths; solving twice keeps the condition number of Φ."""
    identity = torch.eye(len(system.design), dtype=torch.float64)
    return system.solve(system.solve(identity).T)


def residuals_of_groups(equations: Equations, scatter: Scatter, strengths: Tensor) -> Tensor:
    """Inner products of the residuals r_g = t_g − A_gλ of groups, whose noise is independent.

    What the fit absorbs of the groups' deviations is taken out. Groups of draws, where the target
    has them, are paired with groups of probes: as many as there are of the fewer.
    """
    count, targets, groups = len(equations.names), equations.targets, scatter.groups
    factor, noisy = equations.noisy_factor(), list(scatter.noisy)
    start, size = count + targets, groups * len(noisy)
    gram = torch.zeros(start + size, start + size, dtype=torch.float64)
    gram[:start, :start] = factor.T @ factor
    gram[:, start:] = scatter.products
    gram[start:, :start] = scatter.products[:start].T
    pairs = groups if targets == 1 else min(groups, targets)
    deviations = torch.zeros(start + size, pairs, dtype=torch.float64)
    for g in range(groups):
        own = slice(start + g * len(noisy), start + (g + 1) * len(noisy))
        deviations[own, g * pairs // groups] = -strengths[noisy] * pairs / groups
    for g in range(targets if targets > 1 else 0):
        deviations[count + g, g * pairs // targets] = pairs / targets
    deviations[count:start] -= deviations[count:start].mean(1, keepdim=True)
    inverse = gram_inverse(System(equations.factor()[:, :count]))
    deviations[:count] -= inverse @ (gram[:count] @ deviations)
    mean = torch.zeros(start + size, 1, dtype=torch.float64)
    mean[:count, 0], mean[count:start] = -strengths, 1 / targets
    residuals = mean + deviations
    return residuals.T @ gram @ residuals
