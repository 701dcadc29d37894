"""Families that see a tensor as rows or as a matrix: group lasso and the nuclear norm."""

import torch
from torch import Tensor

from tacit.objective.params import Scope, to_float64
from tacit.regularizers.family import Regularizer, Slope, separable


def group_l2(*, scope: Scope = None, name: str = "group_l2") -> Regularizer:
    """Group lasso, Σ_g ‖θ_g‖: a group is one unit's incoming weights.

    That is a row of a tensor (a slice along its first dimension); an entry of a vector is a group
    of its own. Trap: a group that is exactly zero has no gradient; its rows leave the equations.
    """

    def rows(tensor: Tensor) -> Tensor:
        return tensor.reshape(len(tensor) if tensor.ndim else 1, -1)

    def slope(tensor: Tensor, _: str) -> Slope:
        flat, width = tensor.flatten(), rows(tensor).shape[1]
        norms = to_float64(torch.linalg.vector_norm(rows(tensor), dim=1, dtype=_widest(tensor)))

        def own(part: slice) -> Tensor:
            return norms[torch.arange(part.start, part.stop, device=norms.device) // width]

        return Slope(
            at=lambda part: to_float64(flat[part]) / torch.where(own(part) > 0, own(part), 1.0),
            kinks=lambda part: own(part) == 0,
        )

    return separable(
        name,
        scope=scope,
        value=lambda theta, _: torch.linalg.vector_norm(rows(theta), dim=1).sum(),
        slope=slope,
    )


def nuclear_norm(*, scope: Scope = None, name: str = "nuclear_norm") -> Regularizer:
    """Sum of singular values of every matrix; tensors of more dimensions as (first, rest).

    Vectors are not covered. The gradient is U Vᵀ. Trap: a matrix of deficient rank has no
    gradient; its rows leave the equations.
    """

    def slope(tensor: Tensor, _: str) -> Slope:
        matrix = to_float64(tensor.reshape(len(tensor), -1))
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        deficient = bool(s[-1] <= max(matrix.shape) * torch.finfo(tensor.dtype).eps * s[0])
        flat = (u @ vh).flatten()
        return Slope(
            at=lambda part: flat[part],
            kinks=lambda part: torch.full_like(flat[part], deficient, dtype=torch.bool),
        )

    return separable(
        name,
        scope=scope,
        value=lambda theta, _: torch.linalg.matrix_norm(theta.reshape(len(theta), -1), ord="nuc"),
        slope=slope,
        covers=lambda tensor: tensor.ndim >= 2,
    )


def _widest(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
