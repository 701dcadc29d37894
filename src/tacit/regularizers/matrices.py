"""Families of rows and matrices: group lasso, penalties of singular values, orthogonality."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.errors import check_number
from tacit.objective.params import Params, Scope, entries_of, square_norms, to_float64
from tacit.objective.ranks import current_ranks
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
        return tensor.flatten(1) if tensor.ndim > 1 else tensor.reshape(-1, 1)

    def norms_of(tensor: Tensor) -> Tensor:
        dtype = (
            torch.float32 if tensor.device.type == "mps" else torch.float64
        )  # mps has no float64
        return to_float64(torch.linalg.vector_norm(as_rows(tensor), dim=1, dtype=dtype))

    def gradient(tensor: Tensor, zero: Callable[[], float]) -> TensorGradient:
        row_norms, width = norms_of(tensor), as_rows(tensor).shape[1]

        def norms(part: slice) -> Tensor:
            """The norm of the group that each entry of the slice belongs to."""
            entries = torch.arange(part.start, part.stop, device=row_norms.device)
            return row_norms[entries // width]

        return TensorGradient(
            at=lambda part: (
                to_float64(entries_of(tensor, part))
                / torch.where(norms(part) > 0, norms(part), 1.0)
            ),
            kinks=lambda part: norms(part) <= zero(),
        )

    def value(tensor: Tensor, _: str) -> Tensor:
        return torch.linalg.vector_norm(as_rows(tensor), dim=1).sum()

    def make(zero: Callable[[], float]) -> Regularizer:
        return separable(
            name, scope, value=value, gradient=lambda t, _: gradient(t, zero), by_row=True
        )

    largest = _largest_by(lambda tensor: norms_of(tensor).max())
    lasso = with_kink_at_zero(make, zero_width, largest=largest)
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
    nuclear = schatten(1.0, scope=scope, name=name, zero_width=zero_width)
    return replace(nuclear, definition="nuclear_norm")


def schatten(
    p: float, *, scope: Scope = None, name: str = "schatten", zero_width: float = ZERO_WIDTH
) -> Regularizer:
    """Schatten penalty, R(θ) = Σ_W Σ_k σ_k(W)^p for any p > 0, with gradient p U S^(p−1) Vᵀ.

    W = U S Vᵀ are all matrices; tensors of more than two dimensions are reshaped by their first.
    p = 1 is `nuclear_norm`, and p = 2 is `l2` of the matrices. Weight decay μ of n factors,
    W = W_n … W_1, is strength nμ/2 at p = 2/n, as a penalty of their product.

    At deficient rank and p < 2 the equations of all columns and of the target are along the row and
    column space, as for `nuclear_norm`: for p ≤ 1 there is no gradient in other directions, and for
    1 < p < 2 rounding decides it, because σ^(p−1) of a σ that is zero up to rounding is not small.

    Trap: singular values up to `zero_width` times the norm of the largest matrix in scope, and
    those at the level of rounding, count as zero; pass a larger width where training only came near
    a low rank. For p < 1 the smallest singular values dominate the column.

    Args:
        p: the exponent.
        scope: which parameters the sum runs over.
        name: the name that the strength is listed under.
        zero_width: singular values up to this part of the largest norm in scope count as zero;
            without effect for p ≥ 2.
    """
    check_number("p", p, above=0)
    p = float(p)

    def gradient(tensor: Tensor, zero: Callable[[], float]) -> TensorGradient:
        if p == 2:
            flat = tensor.flatten()
            return TensorGradient(at=lambda part: 2 * to_float64(flat[part]))
        u, s, vh, rounding = decompose(tensor)
        rank = len(s) if p > 2 else int((s > max(rounding, zero())).sum())
        flat = ((u[:, :rank] * (p * s[:rank] ** (p - 1))) @ vh[:rank]).flatten()
        subspace = None if rank == len(s) else row_and_column_space(u[:, :rank], vh[:rank])
        return TensorGradient(at=lambda part: flat[part], subspace=subspace)

    def value(tensor: Tensor, _: str) -> Tensor:
        if p == 2:
            return tensor.square().sum()
        s = torch.linalg.svdvals(tensor.flatten(1))
        if p >= 1:
            return (s**p).sum()
        # σ^p of a σ that is zero up to rounding is not small, and its derivative is large.
        positive = s > s.detach().norm() * torch.finfo(s.dtype).eps
        return torch.where(positive, torch.where(positive, s, 1.0) ** p, 0.0).sum()

    def make(zero: Callable[[], float]) -> Regularizer:
        return _sum_over_matrices(name, scope, value, lambda tensor: gradient(tensor, zero))

    family = with_kink_at_zero(make, zero_width, largest=_largest_norm)
    if p >= 2:
        family = replace(family, with_zero_width=None)
    return replace(family, definition=f"schatten(p={p!r})")


def spectral_norm(
    *, scope: Scope = None, name: str = "spectral_norm", equal_width: float = ZERO_WIDTH
) -> Regularizer:
    """Spectral norm, R(θ) = Σ_W σ_1(W): the largest singular values of all matrices W, summed.

    The gradient is u_1 v_1ᵀ. Tensors of more than two dimensions are reshaped by their first.

    Where the r largest singular values are equal, with vectors U and V, there is a derivative only
    along the directions D in which they stay equal, where the symmetric part of Uᵀ D V is a
    multiple of the identity. Along these the gradient is U Vᵀ/r, and the equations of all columns
    and of the target are those directions.

    Trap: training with this penalty makes the largest singular values equal, but rarely to the last
    digit. Those within `equal_width` times the largest, or within rounding, count as equal to it;
    pass a larger width where training only came near. With too small a width the strength comes
    out too small, and the fit explains little.

    Args:
        scope: which parameters the sum runs over.
        name: the name that the strength is listed under.
        equal_width: how far below the largest, as a part of it, singular values count as equal.
    """
    check_number("equal_width", equal_width, least=0, below=1)

    def gradient(tensor: Tensor) -> TensorGradient:
        top = _largest(tensor, equal_width)
        flat = (top.u @ top.vh / max(top.multiplicity, 1)).flatten()
        return TensorGradient(at=lambda part: flat[part], subspace=_subspace_of_largest(top))

    def value(tensor: Tensor, _: str) -> Tensor:
        return torch.linalg.svdvals(tensor.flatten(1)).amax()

    return replace(_sum_over_matrices(name, scope, value, gradient), definition="spectral_norm")


def stable_rank(
    *, scope: Scope = None, name: str = "stable_rank", equal_width: float = ZERO_WIDTH
) -> Regularizer:
    """Stable rank, R(θ) = Σ_W ‖W‖_F²/σ_1(W)², at least 1 and at most the rank of each matrix W.

    The gradient is (2/σ_1²)(W − (‖W‖_F²/σ_1) u_1 v_1ᵀ). Tensors of more than two dimensions are
    reshaped by their first. Matrices of one row or column have stable rank 1 whatever their
    weights, and are not covered. A matrix that is zero has none: its value counts as 0, and it has
    no equations.

    Where the largest singular values are equal, the equations are those of `spectral_norm`.

    Trap: it does not change with the scale of a matrix, so that its column is orthogonal to each
    matrix. At matrices of rank 1, and at multiples of orthogonal ones, its column is zero.

    Args:
        scope: which parameters the sum runs over.
        name: the name that the strength is listed under.
        equal_width: how far below the largest, as a part of it, singular values count as equal.
    """
    check_number("equal_width", equal_width, least=0, below=1)

    def gradient(tensor: Tensor) -> TensorGradient:
        top = _largest(tensor, equal_width)
        u, s, vh, rounding = top.whole
        # W − (‖W‖²/σ_1) u_1 v_1ᵀ without cancellation: the r largest singular values become
        # −Σ_{k>r} σ_k²/(r σ_1), and the others stay.
        rest = s.clone()
        rest[: top.multiplicity] = 0
        weights = rest.clone()
        if top.multiplicity and rest.norm() > rounding:
            largest = s[: top.multiplicity].mean()
            weights[: top.multiplicity] = -rest.square().sum() / (top.multiplicity * largest)
            weights *= 2 / largest**2
        else:  # a matrix of rank 1, multiples of orthogonal ones, and zero
            weights.zero_()
        flat = ((u * weights) @ vh).flatten()
        return TensorGradient(at=lambda part: flat[part], subspace=_subspace_of_largest(top))

    def value(tensor: Tensor, _: str) -> Tensor:
        largest = torch.linalg.svdvals(tensor.flatten(1)).amax()
        ratio = tensor.flatten(1) / torch.where(largest > 0, largest, 1.0)
        return ratio.square().sum()

    family = _sum_over_matrices(name, scope, value, gradient, least=2)
    return replace(family, definition="stable_rank")


def orthogonality(*, scope: Scope = None, name: str = "orthogonality") -> Regularizer:
    """Distance from orthogonality, R(θ) = Σ_W ‖WᵀW − I‖_F², with gradient 4 W (WᵀW − I).

    The columns of a tall matrix are orthonormal where it is 0. ‖WWᵀ − I‖_F² differs from it by a
    constant only, so that it has the same column: for a wide matrix the minimum is where the rows
    are orthonormal. Tensors of more than two dimensions are reshaped by their first.

    Trap: it is Σ_k (σ_k² − 1)² up to a constant. Where all singular values are well below 1, its
    column is nearly that of `l2` of the matrices with a negative strength.
    """

    def gradient(tensor: Tensor) -> TensorGradient:
        matrix = to_float64(tensor.flatten(1))
        tall = matrix.shape[0] >= matrix.shape[1]
        gram = matrix.T @ matrix if tall else matrix @ matrix.T
        gram.diagonal().sub_(1)
        eps, size = torch.finfo(tensor.dtype).eps, max(matrix.shape)
        if gram.abs().max() <= 4 * eps + size * torch.finfo(gram.dtype).eps:
            gram.zero_()  # orthonormal up to rounding
        flat = 4 * (matrix @ gram if tall else gram @ matrix).flatten()
        return TensorGradient(at=lambda part: flat[part])

    def value(tensor: Tensor, _: str) -> Tensor:
        matrix = tensor.flatten(1)
        height, width = matrix.shape
        gram = matrix.T @ matrix if height >= width else matrix @ matrix.T
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return (gram - identity).square().sum() + max(width - height, 0)

    return replace(_sum_over_matrices(name, scope, value, gradient), definition="orthogonality")


def is_matrix(tensor: Tensor, least: int = 1) -> bool:
    """Whether a tensor, reshaped by its first dimension, has so many rows and columns."""
    if tensor.ndim < 2:
        return False
    height = int(current_ranks().sum_parts(torch.tensor(len(tensor))))
    return min(height, math.prod(tensor.shape[1:])) >= least


def _largest_by(size: Callable[[Tensor], Tensor]) -> Callable[[Params], float]:
    """The largest size(tensor) of several tensors, for `with_kink_at_zero`."""

    def largest(tensors: Params) -> float:
        here = max((float(size(t)) for t in tensors.values() if t.numel()), default=0.0)
        return current_ranks().largest_of_parts(here)

    return largest


def _largest_norm(tensors: Params) -> float:
    """The norm of the largest tensor, for `with_kink_at_zero`."""
    return math.sqrt(max(square_norms(tensors).values(), default=0.0))


def _sum_over_matrices(
    name: str,
    scope: Scope,
    value: Callable[[Tensor, str], Tensor],
    gradient: Callable[[Tensor], TensorGradient],
    least: int = 1,
) -> Regularizer:
    """A family over all tensors of two or more dimensions, with at least so many rows and columns.

    A tensor of more dimensions has as columns all entries of one index of its first dimension.
    """

    def covers(tensor: Tensor, _: str) -> bool:
        return is_matrix(tensor, least)

    return separable(
        name, scope, value=value, gradient=lambda tensor, _: gradient(tensor), covers=covers
    )


class _Decomposition(NamedTuple):
    """W = U S Vᵀ in float64, and the size below which singular values are rounding."""

    u: Tensor
    s: Tensor
    vh: Tensor
    rounding: float


def decompose(tensor: Tensor) -> _Decomposition:
    """Rounding of all weights moves singular values by at most ε‖W‖_F/2; four ε leave a margin."""
    matrix = to_float64(tensor.flatten(1))
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    of_weights = 4 * torch.finfo(tensor.dtype).eps * float(s.norm())
    of_decomposition = max(matrix.shape) * torch.finfo(torch.float64).eps * float(s[0])
    return _Decomposition(u, s, vh, of_weights + of_decomposition)


class _Largest(NamedTuple):
    """The largest singular values, all equal, and their vectors."""

    multiplicity: int
    """How many; none if the matrix is zero."""
    u: Tensor
    vh: Tensor
    whole: _Decomposition


def _largest(tensor: Tensor, equal_width: float) -> _Largest:
    whole = decompose(tensor)
    largest = float(whole.s[0])
    rounding = min(whole.rounding, 1e-3 * largest)  # in low precision it would be many
    least = largest - max(rounding, equal_width * largest)
    multiplicity = int((whole.s >= least).sum()) if largest > 0 else 0
    return _Largest(multiplicity, whole.u[:, :multiplicity], whole.vh[:multiplicity], whole)


def _subspace_of_largest(top: _Largest) -> Subspace | None:
    """The directions D in which the largest singular values of a matrix stay equal.

    With A = Uᵀ D V of these, D is orthogonal to all U S Vᵀ with S symmetric and of trace 0.
    """
    if top.multiplicity == 1:
        return None
    height, width = len(top.whole.u), top.whole.vh.shape[1]

    def project(vectors: Tensor) -> Tensor:
        if top.multiplicity == 0:
            return torch.zeros_like(vectors)
        left, right = top.u.to(vectors), top.vh.to(vectors)
        matrices = vectors.T.reshape(-1, height, width)
        products = left.T @ matrices @ right.T
        unequal = (products + products.mT) / 2
        means = unequal.diagonal(dim1=1, dim2=2).mean(1)
        unequal = unequal - means[:, None, None] * torch.eye(top.multiplicity).to(vectors)
        return (matrices - left @ unequal @ right).flatten(1).T

    lost = top.multiplicity * (top.multiplicity + 1) // 2 - 1
    dimension = height * width - lost if top.multiplicity else 0
    return Subspace(dimension, project, reason="equal largest singular values")


def row_and_column_space(u: Tensor, vh: Tensor) -> Subspace:
    """The directions U A + B Vᵀ of matrices with column space U and row space V."""
    (height, rank), width = u.shape, vh.shape[1]

    def project(vectors: Tensor) -> Tensor:
        left, right = u.to(vectors), vh.to(vectors)
        matrices = vectors.T.reshape(-1, height, width)
        outside = matrices - left @ (left.T @ matrices)
        outside = outside - (outside @ right.T) @ right
        return (matrices - outside).flatten(1).T

    return Subspace(rank * (height + width - rank), project)
