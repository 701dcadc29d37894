"""Naive dense implementations, short enough to check by eye: the reference of the tests.

Every function here forms whole matrices, and one graph over the whole data set. The only code
shared with the rest of the library is the regularizers' values, which autograd differentiates.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from tacit.objective.params import Params
from tacit.regularizers import Regularizer

Function = Callable[[Params], Tensor]
"""A scalar function of the parameters, such as the loss over all examples."""


def flat(tensors: Params) -> Tensor:
    """All tensors as one vector."""
    return torch.cat([t.reshape(-1) for t in tensors.values()])


def unflatten(vector: Tensor, like: Params) -> Params:
    """A vector as named tensors in the shapes of others."""
    parts = vector.split([p.numel() for p in like.values()])
    return {n: part.reshape(p.shape) for (n, p), part in zip(like.items(), parts, strict=True)}


def gradient(function: Function, params: Params) -> Tensor:
    """∇f as one vector."""
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    parts = torch.autograd.grad(function(leaves), list(leaves.values()), materialize_grads=True)
    return flat(dict(zip(leaves, parts, strict=True)))


def hessian(function: Function, params: Params) -> Tensor:
    """∇²f as one matrix."""
    return torch.autograd.functional.hessian(  # pyright: ignore
        lambda vector: function(unflatten(vector, params)), flat(params)
    )


def design(regularizers: Sequence[Regularizer], params: Params) -> Tensor:
    """The matrix of columns ∇R_j(θ), one per strength, by autograd of the values R_j(θ)."""
    columns = [
        gradient(lambda p, r=regularizer, j=j: r.value(p)[j], params)
        for regularizer in regularizers
        for j in range(len(regularizer.value(params)))
    ]
    return torch.stack(columns, dim=1)


def endpoint_target(loss: Function, params: Params) -> Tensor:
    """−∇L."""
    return -gradient(loss, params)


def difference_target(technique: Function, plain: Function, params: Params) -> Tensor:
    """∇L_technique − ∇L_plain."""
    return gradient(technique, params) - gradient(plain, params)


def euler_target(loss: Function, point: Params, displacement: Params, time: float) -> Tensor:
    """(−time·∇L − observed displacement)/time."""
    return -gradient(loss, point) - flat(displacement) / time


def flow_displacement(loss: Function, point: Params, time: float, *, substeps: int = 10) -> Tensor:
    """θ(time) − θ(0) along dθ/dt = −∇L from a point, by the classical Runge–Kutta method."""
    theta, h = flat(point), time / substeps

    def velocity(vector: Tensor) -> Tensor:
        return -gradient(loss, unflatten(vector, point))

    for _ in range(substeps):
        k1 = velocity(theta)
        k2 = velocity(theta + h / 2 * k1)
        k3 = velocity(theta + h / 2 * k2)
        k4 = velocity(theta + h * k3)
        theta = theta + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return theta - flat(point)


def fit(design: Tensor, target: Tensor, *, rank: float = 1e-12) -> Tensor:
    """Least-squares strengths; where columns are linearly dependent, those of least norm.

    With N the norms of the columns and design·N⁻¹ = U S Vᵀ, the equations determine only Vᵀ N λ for
    the singular values S that are not zero. Of all λ with VᵀNλ = S⁻¹Uᵀ·target the shortest is
    returned.

    Args:
        design: columns ∇R_j.
        target: the right-hand side.
        rank: singular values up to this fraction of the largest are zero.
    """
    matrix, rhs = design.double().numpy(), target.double().numpy()
    norms = np.linalg.norm(matrix, axis=0)
    unit_columns = matrix / np.where(norms > 0, norms, 1)
    u, s, vh = np.linalg.svd(unit_columns, full_matrices=False)
    nonzero = s > rank * s[0]
    constraints = vh[nonzero] * norms
    determined = (u[:, nonzero].T @ rhs) / s[nonzero]
    return torch.from_numpy(np.linalg.pinv(constraints, rcond=1e-14) @ determined)


def fit_nonnegative(design: Tensor, target: Tensor) -> Tensor:
    """Least-squares strengths with λ ≥ 0."""
    return torch.from_numpy(nnls(design.double().numpy(), target.double().numpy())[0])


def explained(design: Tensor, strengths: Tensor, target: Tensor) -> float:
    """1 − ‖target − design·λ‖²/‖target‖²."""
    residual = target - design @ strengths
    return float(1 - residual.square().sum() / target.square().sum())
