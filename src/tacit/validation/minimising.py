"""The built-in trainer: L-BFGS in float64, then Newton steps where the Hessian can be held."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.validation.curvature import DENSE, ZERO
from tacit.validation.penalised import NoHessianError, Penalised

FAR = 1e8
"""Weights this many times beyond where they started have left for infinity."""
EVALUATIONS = 5000
"""Of f, in all runs of L-BFGS together; a loss that needs more has no optimum worth the name."""
ESCAPES = 3
STEPS = 20


class _LeftError(Exception):
    """Minimisation left for infinity, or for where the loss is not finite."""


@dataclass(frozen=True, eq=False)
class Minimum:
    """Where minimisation ended."""

    theta: Tensor
    slope: Tensor
    bounded: bool = True
    """False where f fell on and on, so that the end is arbitrary."""


def minimise(function: Penalised, start: Tensor) -> Minimum:
    """A local minimum of f from a start, to rounding where p ≤ 500.

    L-BFGS is restarted until ‖∇f‖ stops falling; Newton then takes what is left. A saddle, where
    L-BFGS may rest if it starts there, is left along its most negative curvature.
    """
    theta, left = start, EVALUATIONS
    for escapes in range(ESCAPES + 1):
        try:
            limit = FAR * (1 + float(start.norm()))
            theta, left = _descend(function, theta, limit=limit, left=left)
        except _LeftError:
            return Minimum(theta, torch.full_like(theta, torch.inf), bounded=False)
        if len(theta) > DENSE:
            break
        try:
            theta, downhill = _polish(function, theta)
        except NoHessianError:
            break
        if downhill is None or escapes == ESCAPES or left <= 0:
            break
        theta = theta + 1e-3 * max(float(theta.norm()), 1.0) * downhill
    return Minimum(theta, function.value_and_gradient(theta)[1])


def _descend(function: Penalised, theta: Tensor, *, limit: float, left: int) -> tuple[Tensor, int]:
    """L-BFGS until ‖∇f‖ stops falling, and how many evaluations are left."""
    from scipy.optimize import minimize

    value, slope = function.value_and_gradient(theta)

    def both(x):
        if not float(torch.from_numpy(x).norm()) <= limit:
            raise _LeftError
        try:
            f, g = function.value_and_gradient(torch.from_numpy(x.copy()))
        except InputError as error:
            raise _LeftError from error
        return f, g.numpy()

    # A long history: on ill-conditioned losses thirty pairs take thirty times as many steps.
    history = min(len(theta), 100)
    options = {"maxcor": history, "maxiter": EVALUATIONS, "gtol": 0.0, "ftol": 0.0}
    while left > 0:
        options["maxfun"] = left
        found = minimize(both, theta.numpy(), jac=True, method="L-BFGS-B", options=options)
        left -= found.nfev
        ahead = torch.from_numpy(found.x.copy())
        lower, flatter = function.value_and_gradient(ahead)
        if not (lower < value or flatter.norm() < slope.norm()):
            break
        settled = flatter.norm() > slope.norm() / 2 and lower >= value - 1e-12 * abs(value)
        theta, value, slope = ahead, lower, flatter
        if settled:
            break
    return theta, left


def _polish(function: Penalised, theta: Tensor) -> tuple[Tensor, Tensor | None]:
    """Newton on ∇f = 0, as long as ‖∇f‖ falls; and a direction of negative curvature, if any."""
    slope = function.value_and_gradient(theta)[1]
    for _ in range(STEPS):
        values, vectors = torch.linalg.eigh(function.hessian(theta))
        zero = ZERO * function.epsilon * float(values.abs().max())
        if float(values[0]) < -zero:
            side = -1.0 if float(vectors[:, 0] @ slope) > 0 else 1.0
            return theta, side * vectors[:, 0]
        bent = values > zero
        step = vectors[:, bent] @ ((vectors[:, bent].T @ slope) / values[bent])
        for shrink in (1.0, 0.5, 0.1):
            ahead = theta - shrink * step
            flatter = function.value_and_gradient(ahead)[1]
            if flatter.norm() < slope.norm():
                theta, slope = ahead, flatter
                break
        else:
            break
    return theta, None
