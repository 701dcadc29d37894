"""Families that treat a tensor as rows or as a matrix: group lasso and the nuclear norm."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tacit.objective.params import Scope, to_float64
from tacit.regularizers.family import (
    ZERO_WIDTH,
    Regularizer,
    Subspace,
    TensorGradient,
    separable,
    with_kink_at_zero,
)


def group_l2(
    *, scope: Scope = None, name: str = "group_l2", zero_width: float = ZERO_WIDTH
) -> Regularizer:
    """Group lasso, R(θ) = Σ_g ‖θ_g‖, with gradient θ_g/‖θ_g‖ on group g.

    A group is a row of a tensor, that is, a slice along its first dimension: the incoming weights
    of one unit, or the kernel of one output channel. Each entry of a vector is a group by itself.

    Trap: a group that is zero has no gradient. Its rows are removed from all columns and from the
    target, and the fit reports their number. A group counts as zero if its norm is at most
    `zero_width` times the largest in scope; pass a larger one where training only came near zero.
    """

    def as_rows(tensor: Tensor) -> Tensor:
        return tensor.reshape(len(tensor) if tensor.ndim else 1, -1)

    def norms_of(tensor: Tensor) -> Tensor:
        dtype = (
            torch.float32 if tensor.device.type == "mps" else torch.float64
        )  # mps has no float64
        return to_float64(torch.linalg.vector_norm(as_rows(tensor), dim=1, dtype=dtype))

    def gradient(tensor: Tensor, zero: Callable[[], float]) -> TensorGradient:
        flat, width = tensor.flatten(), as_rows(tensor).shape[1]
        row_norms = norms_of(tensor)

        def norms(part: slice) -> Tensor:
            """The norm of the group that each entry of the slice belongs to."""
            entries = torch.arange(part.start, part.stop, device=row_norms.device)
            return row_norms[entries // width]

        return TensorGradient(
            at=lambda part: to_float64(flat[part]) / torch.where(norms(part) > 0, norms(part), 1.0),
            kinks=lambda part: norms(part) <= zero(),
        )

    def value(tensor: Tensor, _: str) -> Tensor:
        return torch.linalg.vector_norm(as_rows(tensor), dim=1).sum()

    def make(zero: Callable[[], float]) -> Regularizer:
        return separable(name, scope, value=value, gradient=lambda t, _: gradient(t, zero))

    lasso = with_kink_at_zero(make, zero_width, size=lambda tensor: norms_of(tensor).max())
    return replace(lasso, definition="group_l2")


def nuclear_norm(
    *, scope: Scope = None, name: str = "nuclear_norm", zero_width: float = ZERO_WIDTH
) -> Regularizer:
    """Nuclear norm, R(θ) = Σ_W Σ_k σ_k(W): the singular values of all matrices W, summed.

    With W = U S Vᵀ the gradient is U Vᵀ. A tensor of more than two dimensions is reshaped to a
    matrix by its first dimension. Vectors, such as biases, are not covered.

    At deficient rank there is a gradient U Vᵀ only along the row and column space, in the
    directions U A + B Vᵀ. Then the equations of all columns and of the target are those directions.

    Trap: singular values up to `zero_width` times the norm of the largest matrix in scope, and
    those at the level of rounding, count as zero; pass a larger width where training only came near
    a low rank.
    """

    def gradient(tensor: Tensor, zero: Callable[[], float]) -> TensorGradient:
        matrix = to_float64(tensor.flatten(1))
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        rounding = max(matrix.shape) * torch.finfo(tensor.dtype).eps * float(s[0])
        rank = int((s > max(rounding, zero())).sum())
        flat = (u[:, :rank] @ vh[:rank]).flatten()
        subspace = None if rank == len(s) else _row_and_column_space(u[:, :rank], vh[:rank])
        return TensorGradient(at=lambda part: flat[part], subspace=subspace)

    def value(tensor: Tensor, _: str) -> Tensor:
        return torch.linalg.matrix_norm(tensor.flatten(1), ord="nuc")

    def make(zero: Callable[[], float]) -> Regularizer:
        return separable(
            name,
            scope,
            value=value,
            gradient=lambda tensor, _: gradient(tensor, zero),
            covers=lambda tensor, _: tensor.ndim >= 2,
        )

    nuclear = with_kink_at_zero(make, zero_width, size=torch.linalg.vector_norm)
    return replace(nuclear, definition="nuclear_norm")


def _row_and_column_space(u: Tensor, vh: Tensor) -> Subspace:
    """The directions U A + B Vᵀ of matrices with column space U and row space V."""
    (height, rank), width = u.shape, vh.shape[1]

    def project(vectors: Tensor) -> Tensor:
        left, right = u.to(vectors), vh.to(vectors)
        matrices = vectors.T.reshape(-1, height, width)
        outside = matrices - left @ (left.T @ matrices)
        outside = outside - (outside @ right.T) @ right
        return (matrices - outside).flatten(1).T

    return Subspace(rank * (height + width - rank), project)
