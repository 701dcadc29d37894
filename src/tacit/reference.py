"""Naive dense versions of everything: short enough to check by eye, and the oracle of the tests.

Every function here holds whole matrices and one graph over the whole data set. It shares no code
with the library's own path but the regularizers' values, which autograd differentiates here.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from tacit.objective.params import Params
from tacit.regularizers import Regularizer

Function = Callable[[Params], Tensor]
"""A scalar function of the parameters, such as a loss over all the data."""


def flat(tensors: Params) -> Tensor:
    """All tensors as one vector."""
    return torch.cat([t.reshape(-1) for t in tensors.values()])


def gradient(function: Function, params: Params) -> Tensor:
    """∇f as one vector."""
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    parts = torch.autograd.grad(
        function(leaves), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return torch.cat([part.reshape(-1) for part in parts])


def hessian(function: Function, params: Params) -> Tensor:
    """∇²f as one matrix."""
    sizes = [p.numel() for p in params.values()]

    def of_vector(vector: Tensor) -> Tensor:
        parts = zip(params.items(), vector.split(sizes), strict=True)
        return function({n: part.reshape(p.shape) for (n, p), part in parts})

    return torch.autograd.functional.hessian(of_vector, flat(params))  # pyright: ignore


def design(regularizers: Sequence[Regularizer], params: Params) -> Tensor:
    """Columns ∇R_j(θ), one for every strength, by autograd of the values."""
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
    """Where dθ/dt = −∇L goes from a point in a given time, by classical Runge–Kutta."""
    sizes, theta, h = [p.numel() for p in point.values()], flat(point), time / substeps

    def slope(vector: Tensor) -> Tensor:
        parts = zip(point.items(), vector.split(sizes), strict=True)
        return -gradient(loss, {n: part.reshape(p.shape) for (n, p), part in parts})

    for _ in range(substeps):
        k1 = slope(theta)
        k2 = slope(theta + h / 2 * k1)
        k3 = slope(theta + h / 2 * k2)
        k4 = slope(theta + h * k3)
        theta = theta + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return theta - flat(point)


def fit(design: Tensor, target: Tensor, *, rank: float = 1e-12) -> Tensor:
    """Least-squares strengths; where columns are dependent, the ones of least norm.

    Dependence is judged on columns of unit norm: those combinations of strengths that the
    equations determine are kept as constraints, and the shortest λ that meets them is taken.
    """
    matrix, right = design.double().numpy(), target.double().numpy()
    norms = np.linalg.norm(matrix, axis=0)
    unit = matrix / np.where(norms > 0, norms, 1)
    u, s, vh = np.linalg.svd(unit, full_matrices=False)
    kept = s > rank * s[0]
    constraints = vh[kept] * norms
    values = (u[:, kept].T @ right) / s[kept]
    return torch.from_numpy(np.linalg.pinv(constraints, rcond=1e-14) @ values)


def fit_nonnegative(design: Tensor, target: Tensor) -> Tensor:
    """Least-squares strengths under λ ≥ 0."""
    return torch.from_numpy(nnls(design.double().numpy(), target.double().numpy())[0])


def explained(design: Tensor, strengths: Tensor, target: Tensor) -> float:
    """1 − ‖target − design·λ‖²/‖target‖²."""
    residual = target - design @ strengths
    return float(1 - residual.square().sum() / target.square().sum())
