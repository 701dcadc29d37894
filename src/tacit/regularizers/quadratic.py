"""Quadratic forms θᵀΛθ with a free matrix: diagonal, or any symmetric one."""

import math

import numpy as np
import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.params import Params, Scope, select, to_float64
from tacit.regularizers.family import Columns, Regularizer, check_name

MOST = 5_000
"""Coefficients beyond which a dense Λ is neither identified nor affordable."""


def diagonal(*, scope: Scope = None, name: str = "diagonal") -> Regularizer:
    """θᵀΛθ with Λ diagonal: one strength a parameter, p of them.

    One endpoint gives p equations, so it fits exactly wherever no weight is zero: that is no
    evidence for it; validate by retraining.
    """
    check_name(name)

    def bind(params: Params) -> Columns:
        names, tensors = _coordinates(name, params, scope)
        _check_size(name, len(names), "p")
        starts = _starts(tensors)

        def rows(tensor: str, part: slice) -> Tensor:
            theta = to_float64(tensors[tensor].flatten()[part])
            values = theta.new_zeros(len(theta), tensors[tensor].numel())
            index = torch.arange(len(theta), device=theta.device)
            values[index, part.start + index] = 2 * theta
            return values

        active = {n: tuple(range(starts[n], starts[n] + t.numel())) for n, t in tensors.items()}
        return Columns(tuple(f"{name}[{n}]" for n in names), active, rows)

    def value(params: Params) -> Tensor:
        return _flat(params, scope, name).square()

    return Regularizer(name, bind, value, kind="diagonal")


def symmetric(*, scope: Scope = None, name: str = "symmetric") -> Regularizer:
    """θᵀΛθ with Λ symmetric: p(p+1)/2 strengths.

    The basis is orthonormal: a diagonal coefficient is Λ_ii, an off-diagonal one √2·Λ_ij. So a
    minimum-norm answer is the Λ of least Frobenius norm. `Fit.matrix()` puts Λ together.
    """
    check_name(name)

    def bind(params: Params) -> Columns:
        names, tensors = _coordinates(name, params, scope)
        size = len(names)
        _check_size(name, size * (size + 1) // 2, "p(p+1)/2")
        starts, theta = (
            _starts(tensors),
            torch.cat([to_float64(t.flatten()) for t in tensors.values()]),
        )
        i, j = torch.triu_indices(size, size, device=theta.device)

        def rows(tensor: str, part: slice) -> Tensor:
            values = theta.new_zeros(part.stop - part.start, len(i))
            for row in range(len(values)):
                own = starts[tensor] + part.start + row
                values[row] = torch.where(i == own, theta[j], 0) + torch.where(
                    j == own, theta[i], 0
                )
            return values * _scale(i == j, theta)

        pairs = zip(i.tolist(), j.tolist(), strict=True)
        columns = tuple(f"{name}[{names[a]},{names[b]}]" for a, b in pairs)
        return Columns(columns, dict.fromkeys(tensors, tuple(range(len(i)))), rows)

    def value(params: Params) -> Tensor:
        theta = _flat(params, scope, name)
        i, j = torch.triu_indices(len(theta), len(theta), device=theta.device)
        return theta[i] * theta[j] * _scale(i == j, theta)

    return Regularizer(name, bind, value, kind="symmetric")


def quadratic_matrix(strengths: Tensor, kind: str) -> Tensor:
    """Λ from the coefficients of a diagonal or symmetric family."""
    if kind == "diagonal":
        return torch.diag(strengths)
    size = math.isqrt(2 * len(strengths))
    i, j = torch.triu_indices(size, size)
    matrix = strengths.new_zeros(size, size)
    matrix[i, j] = strengths / _scale(i == j, strengths)
    return torch.where(torch.eye(size, dtype=torch.bool), matrix, matrix + matrix.T)


def _scale(on_diagonal: Tensor, like: Tensor) -> Tensor:
    """1 for Λ_ii and √2 for Λ_ij: coefficients of an orthonormal basis of symmetric matrices."""
    return torch.where(on_diagonal, 1.0, torch.tensor(2.0, dtype=like.dtype).sqrt().to(like.device))


def _coordinates(name: str, params: Params, scope: Scope) -> tuple[list[str], Params]:
    """Names of the single coordinates (up to the limit), and the tensors they lie in."""
    tensors = {n: params[n].detach() for n in select(params, scope, what=f"scope of {name}")}
    total = sum(t.numel() for t in tensors.values())
    if total > MOST:
        _check_size(name, total, "at least p")
    names = [
        f"{n}[{','.join(map(str, index))}]" if index else n
        for n, t in tensors.items()
        for index in np.ndindex(*t.shape)
    ]
    return names, tensors


def _starts(tensors: Params) -> dict[str, int]:
    starts, total = {}, 0
    for name, tensor in tensors.items():
        starts[name], total = total, total + tensor.numel()
    return starts


def _flat(params: Params, scope: Scope, name: str) -> Tensor:
    chosen = select(params, scope, what=f"scope of {name}")
    return torch.cat([params[n].flatten() for n in chosen])


def _check_size(name: str, size: int, formula: str) -> None:
    if size > MOST:
        raise InputError(
            f"{name}() would have {formula} = {size} coefficients here; at most {MOST} can be "
            "fitted. Limit its scope to a few parameters, or use layerwise(l2())."
        )
