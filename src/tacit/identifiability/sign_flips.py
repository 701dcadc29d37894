"""Whether some columns explain more than chance, by flipping signs of their scores by cluster.

A cluster is a layer, an endpoint or an epoch. Let r be the part of the target that the other
columns do not explain, and B an orthonormal basis of the part of the tested columns that is
orthogonal to the others. The score of cluster g is s_g = B_gᵀ r_g, from its rows only, and the
tested columns add ‖Σ_g s_g‖² to what is explained. If they explain nothing, the scores of clusters
are as likely to have the opposite sign, so that

    p = share of all sign vectors ε with ‖Σ_g ε_g s_g‖² ≥ ‖Σ_g s_g‖²

(effective scores: Hemerik, Goeman & Finos 2020). Rows within a cluster may depend on each other in
any way. With G clusters no p is below 2^(1−G), because ε and −ε are the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.fitting.solving import System

MOST_EXACT = 15
"""Clusters up to which all sign vectors are used; of more, as many are drawn with a fixed seed."""
NOTHING_LEFT = 1e-9
"""A column, or a target, of which the others leave at most this part has nothing left to test."""
TIE = 1e-9
"""Sums within this part of each other count as equal."""


def flip_test(factors: Tensor, tested: Sequence[int], others: Sequence[int]) -> float:
    """The p-value of what the tested columns add to the others; 1 where nothing is left to test.

    Args:
        factors: [design | target] of every cluster, (clusters, rows, columns + 1); rows may be
            triangular factors of the equations.
        tested: the columns that are tested together.
        others: the columns that they are beside.
    """
    scores = effective_scores(factors, tested, others)
    scores = scores[scores.norm(dim=1) > 0]  # the other clusters have none of these columns
    if len(scores) < 2:
        return 1.0
    signs = sign_vectors(len(scores))
    sums = (signs @ scores).square().sum(1)
    as_large = sums >= sums[0] * (1 - TIE)  # the first vector has no minus
    return float(as_large.double().mean())


def least_p(clusters: int) -> float:
    """The smallest p-value that so many clusters can give."""
    return 2.0 ** (1 - min(clusters, MOST_EXACT))


def effective_scores(factors: Tensor, tested: Sequence[int], others: Sequence[int]) -> Tensor:
    """The scores s_g of the tested columns beside the others, (clusters, dimensions)."""
    rows = factors.flatten(0, 1)
    target, columns = rows[:, -1:], System(rows[:, list(tested)]).unit
    beside = System(rows[:, list(others)])
    basis = beside.design @ beside.coordinates
    rest, columns = (_orthogonal_part(part, basis) for part in (target, columns))
    if float(rest.norm()) <= NOTHING_LEFT * float(target.norm()):
        return rows.new_zeros(len(factors), 1)
    columns = columns[:, columns.norm(dim=0) > NOTHING_LEFT]
    if not columns.shape[1]:
        return rows.new_zeros(len(factors), 1)
    left = System(columns)
    products = (left.design @ left.coordinates) * rest
    return products.unflatten(0, factors.shape[:2]).sum(1)


def _orthogonal_part(part: Tensor, basis: Tensor) -> Tensor:
    """The part orthogonal to an orthonormal basis; twice, because once leaves rounding."""
    for _ in range(2):
        part = part - basis @ (basis.T @ part)
    return part


def sign_vectors(clusters: int) -> Tensor:
    """All vectors of signs with +1 in front, the first without a minus; of many, some at random."""
    if clusters <= MOST_EXACT:
        bits = torch.arange(2 ** (clusters - 1))[:, None] >> torch.arange(clusters - 1)
        free = 1.0 - 2.0 * (bits & 1)
    else:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(2, (2 ** (MOST_EXACT - 1), clusters - 1), generator=generator)
        free = 1.0 - 2.0 * drawn
        free[0] = 1.0
    return torch.cat([torch.ones(len(free), 1), free], dim=1).double()
