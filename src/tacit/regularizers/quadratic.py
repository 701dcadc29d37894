"""Quadratic forms θᵀΛθ whose matrix Λ is to be estimated: diagonal, or any symmetric one."""

import math

import numpy as np
import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.params import Params, Scope, select, to_float64
from tacit.regularizers.family import Columns, Regularizer

MAX_COEFFICIENTS = 5_000
"""The largest number of coefficients of Λ: more can neither be identified nor afforded."""


def diagonal(*, scope: Scope = None, name: str = "diagonal") -> Regularizer:
    """Diagonal quadratic form, θᵀΛθ = Σ_i λ_i θ_i²: one strength per parameter.

    The p strengths are named after their entries, such as `diagonal[0.weight[1,2]]`. At most 5,000
    are possible; use a scope. `Fit.matrix()` returns Λ.

    Trap: one endpoint gives p equations for p strengths, 2 λ_i θ_i = −∂L/∂θ_i, so the fit is exact
    wherever no weight is zero. An explained fraction of 1 is therefore no evidence for this
    penalty: validate by retraining, or stack several endpoints.
    """

    def bind(params: Params) -> Columns:
        tensors, positions, entries = _entries(name, params, scope, kind="diagonal")

        def rows(tensor_name: str, part: slice) -> Tensor:
            theta = to_float64(tensors[tensor_name].flatten())
            block = theta.new_zeros(len(theta[part]), len(theta))
            block.diagonal(part.start).copy_(2 * theta[part])
            return block

        active = {n: tuple(position.tolist()) for n, position in positions.items()}
        return Columns(tuple(f"{name}[{entry}]" for entry in entries), active, rows)

    def value(params: Params) -> Tensor:
        return _flatten(name, params, scope).square()

    return Regularizer(name, bind, value, kind="diagonal")


def symmetric(*, scope: Scope = None, name: str = "symmetric") -> Regularizer:
    """Quadratic form θᵀΛθ with any symmetric matrix Λ: p(p+1)/2 strengths.

    At most 5,000 strengths are possible, that is p = 99 parameters; use a scope. `Fit.matrix()`
    returns Λ, and `fit(equations, psd=True)` keeps it positive semidefinite.

    Traps: the strengths are coefficients of an orthonormal basis: Λ_ii on the diagonal, but √2·Λ_ij
    off it, so that the minimum-norm solution is the Λ of least Frobenius norm. One endpoint gives
    only p equations, so Λ is underdetermined unless many endpoints are stacked.
    """

    def bind(params: Params) -> Columns:
        tensors, positions, entries = _entries(name, params, scope, kind="symmetric")
        theta = torch.cat([to_float64(t.flatten()) for t in tensors.values()])
        i, j = torch.triu_indices(len(theta), len(theta), device=theta.device)

        def rows(tensor_name: str, part: slice) -> Tensor:
            # ∂(θ_i θ_j)/∂θ_m = [i = m] θ_j + [j = m] θ_i
            m = positions[tensor_name][part].to(theta.device).unsqueeze(1)
            block = torch.where(i == m, theta[j], 0) + torch.where(j == m, theta[i], 0)
            return block * _basis_scale(i == j, theta)

        pairs = zip(i.tolist(), j.tolist(), strict=True)
        names = tuple(f"{name}[{entries[a]},{entries[b]}]" for a, b in pairs)
        return Columns(names, dict.fromkeys(tensors, tuple(range(len(i)))), rows)

    def value(params: Params) -> Tensor:
        theta = _flatten(name, params, scope)
        i, j = torch.triu_indices(len(theta), len(theta), device=theta.device)
        return theta[i] * theta[j] * _basis_scale(i == j, theta)

    return Regularizer(name, bind, value, kind="symmetric")


def quadratic_matrix(strengths: Tensor, kind: str) -> Tensor:
    """Λ from the strengths of a `diagonal` or `symmetric` family."""
    if kind == "diagonal":
        return torch.diag(strengths)
    size = math.isqrt(2 * len(strengths))
    i, j = torch.triu_indices(size, size)
    matrix = strengths.new_zeros(size, size)
    matrix[i, j] = matrix[j, i] = strengths / _basis_scale(i == j, strengths)
    return matrix


def _basis_scale(on_diagonal: Tensor, like: Tensor) -> Tensor:
    """The factor of θ_i θ_j in an orthonormal basis of symmetric matrices: 1 if i = j, else √2."""
    return torch.where(on_diagonal, 1.0, 2.0).to(like).sqrt()


def _entries(
    name: str, params: Params, scope: Scope, *, kind: str
) -> tuple[Params, Params, list[str]]:
    """The tensors in scope, and of all their entries the positions in θ and the names.

    The name of an entry is such as `0.weight[1,2]`.
    """
    tensors = {n: params[n].detach() for n in select(params, scope, what=f"scope of {name}")}
    sizes = [t.numel() for t in tensors.values()]
    p = sum(sizes)
    formula, count = ("p", p) if kind == "diagonal" else ("p(p+1)/2", p * (p + 1) // 2)
    if count > MAX_COEFFICIENTS:
        raise InputError(
            f"{name}() would have {formula} = {count} coefficients for p = {p} parameters; at most "
            f"{MAX_COEFFICIENTS} can be fitted. Limit its scope, or use layerwise(l2())."
        )
    positions = dict(zip(tensors, torch.arange(p).split(sizes), strict=True))
    names = [
        f"{n}[{','.join(map(str, index))}]" if index else n
        for n, t in tensors.items()
        for index in np.ndindex(*t.shape)
    ]
    return tensors, positions, names


def _flatten(name: str, params: Params, scope: Scope) -> Tensor:
    """All parameters in scope as one vector."""
    in_scope = select(params, scope, what=f"scope of {name}")
    return torch.cat([params[n].flatten() for n in in_scope])
