"""Families that treat a tensor as rows or as a matrix: group lasso and the nuclear norm."""

import torch
from torch import Tensor

from tacit.objective.params import Scope, to_float64
from tacit.regularizers.family import Regularizer, TensorGradient, separable


def group_l2(*, scope: Scope = None, name: str = "group_l2") -> Regularizer:
    """Group lasso, R(θ) = Σ_g ‖θ_g‖, with gradient θ_g/‖θ_g‖ on group g.

    A group is a row of a tensor, that is, a slice along its first dimension: the incoming weights
    of one unit, or the kernel of one output channel. Each entry of a vector is a group by itself.

    Trap: a group that is exactly zero has no gradient. Its rows are removed from all columns and
    from the target, and the fit reports their number.
    """

    def as_rows(tensor: Tensor) -> Tensor:
        return tensor.reshape(len(tensor) if tensor.ndim else 1, -1)

    def gradient(tensor: Tensor, _: str) -> TensorGradient:
        flat, width = tensor.flatten(), as_rows(tensor).shape[1]
        dtype = (
            torch.float32 if tensor.device.type == "mps" else torch.float64
        )  # mps has no float64
        row_norms = to_float64(torch.linalg.vector_norm(as_rows(tensor), dim=1, dtype=dtype))

        def norms(part: slice) -> Tensor:
            """The norm of the group that each entry of the slice belongs to."""
            entries = torch.arange(part.start, part.stop, device=row_norms.device)
            return row_norms[entries // width]

        return TensorGradient(
            at=lambda part: to_float64(flat[part]) / torch.where(norms(part) > 0, norms(part), 1.0),
            kinks=lambda part: norms(part) == 0,
        )

    def value(tensor: Tensor, _: str) -> Tensor:
        return torch.linalg.vector_norm(as_rows(tensor), dim=1).sum()

    return separable(name, scope, value=value, gradient=gradient)


def nuclear_norm(*, scope: Scope = None, name: str = "nuclear_norm") -> Regularizer:
    """Nuclear norm, R(θ) = Σ_W Σ_k σ_k(W): the singular values of all matrices W, summed.

    With W = U S Vᵀ the gradient is U Vᵀ. A tensor of more than two dimensions is reshaped to a
    matrix by its first dimension. Vectors, such as biases, are not covered.

    Trap: a matrix of deficient rank has no gradient. Its rows are removed from all columns and from
    the target, and the fit reports their number.
    """

    def gradient(tensor: Tensor, _: str) -> TensorGradient:
        matrix = to_float64(tensor.flatten(1))
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        deficient = bool(s[-1] <= max(matrix.shape) * torch.finfo(tensor.dtype).eps * s[0])
        flat = (u @ vh).flatten()
        return TensorGradient(
            at=lambda part: flat[part],
            kinks=lambda part: torch.full_like(flat[part], deficient, dtype=torch.bool),
        )

    def value(tensor: Tensor, _: str) -> Tensor:
        return torch.linalg.matrix_norm(tensor.flatten(1), ord="nuc")

    def covers(tensor: Tensor, _: str) -> bool:
        return tensor.ndim >= 2

    return separable(name, scope, value=value, gradient=gradient, covers=covers)
