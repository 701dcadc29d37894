"""The built-in trainer: L-BFGS in float64, then Newton steps where the Hessian fits in memory."""

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.validation.curvature import DENSE_LIMIT, ZERO_TOLERANCE
from tacit.validation.penalised import NoHessianError, PenalisedObjective

DIVERGED = 1e8
"""Minimisation has diverged once ‖θ‖ exceeds this many times 1 + ‖start‖."""
MAX_EVALUATIONS = 5000
"""Evaluations of f in all L-BFGS runs together."""
MAX_ESCAPES = 3
"""How often a saddle is left before minimisation stops."""
MAX_NEWTON_STEPS = 20


class _DivergedError(Exception):
    """Minimisation went to infinity, or to where the loss is not finite."""


def minimise(function: PenalisedObjective, start: Tensor) -> tuple[Tensor, bool]:
    """A local minimum of f, exact to rounding for up to 500 parameters, and whether it is one.

    False says that minimisation diverged; the point is then arbitrary.
    L-BFGS is restarted until ‖∇f‖ stops decreasing, then Newton steps reduce ‖∇f‖ to rounding.
    Where the Hessian has a negative eigenvalue (a saddle, at which L-BFGS can stop if it starts
    there), minimisation continues along that eigenvector.
    """
    theta, evaluations = start, MAX_EVALUATIONS
    for escapes in range(MAX_ESCAPES + 1):
        try:
            max_norm = DIVERGED * (1 + float(start.norm()))
            theta, evaluations = _lbfgs(function, theta, max_norm=max_norm, evaluations=evaluations)
        except _DivergedError:
            return theta, False
        if len(theta) > DENSE_LIMIT:
            break
        try:
            theta, descent_direction = _newton(function, theta)
        except NoHessianError:
            break
        if descent_direction is None or escapes == MAX_ESCAPES or evaluations <= 0:
            break
        theta = theta + 1e-3 * max(float(theta.norm()), 1.0) * descent_direction
    return theta, True


def _lbfgs(
    function: PenalisedObjective, theta: Tensor, *, max_norm: float, evaluations: int
) -> tuple[Tensor, int]:
    """L-BFGS until ‖∇f‖ stops decreasing.

    Args:
        function: f.
        theta: where to start.
        max_norm: minimisation has diverged once ‖θ‖ exceeds this.
        evaluations: how many evaluations of f are allowed.

    Returns:
        The end point, and the number of evaluations that were not used.
    """
    from scipy.optimize import minimize

    value, gradient = function.value_and_gradient(theta)

    def value_and_gradient(x):
        if not float(torch.from_numpy(x).norm()) <= max_norm:
            raise _DivergedError
        try:
            f, g = function.value_and_gradient(torch.from_numpy(x.copy()))
        except InputError as error:
            raise _DivergedError from error
        return f, g.numpy()

    # A long history: on ill-conditioned losses thirty pairs take thirty times as many steps.
    options = {"maxcor": min(len(theta), 100), "maxiter": MAX_EVALUATIONS, "gtol": 0.0, "ftol": 0.0}
    while evaluations > 0:
        options["maxfun"] = evaluations
        start = theta.numpy()
        outcome = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
        evaluations -= outcome.nfev
        new_theta = torch.from_numpy(outcome.x.copy())
        new_value, new_gradient = function.value_and_gradient(new_theta)
        if not (new_value < value or new_gradient.norm() < gradient.norm()):
            break
        same_value = new_value >= value - 1e-12 * abs(value)
        converged = same_value and new_gradient.norm() > gradient.norm() / 2
        theta, value, gradient = new_theta, new_value, new_gradient
        if converged:
            break
    return theta, evaluations


def _newton(function: PenalisedObjective, theta: Tensor) -> tuple[Tensor, Tensor | None]:
    """Newton's method on ∇f = 0 as long as ‖∇f‖ decreases.

    Returns:
        The end point, and an eigenvector of negative curvature that does not point uphill; None
        where the Hessian has no negative eigenvalue.
    """
    gradient = function.value_and_gradient(theta)[1]
    for _ in range(MAX_NEWTON_STEPS):
        values, vectors = torch.linalg.eigh(function.hessian(theta))
        zero_level = ZERO_TOLERANCE * function.epsilon * float(values.abs().max())
        if float(values[0]) < -zero_level:
            sign = -1.0 if float(vectors[:, 0] @ gradient) > 0 else 1.0
            return theta, sign * vectors[:, 0]
        curved = values > zero_level
        step = vectors[:, curved] @ ((vectors[:, curved].T @ gradient) / values[curved])
        for fraction in (1.0, 0.5, 0.1):
            new_theta = theta - fraction * step
            new_gradient = function.value_and_gradient(new_theta)[1]
            if new_gradient.norm() < gradient.norm():
                theta, gradient = new_theta, new_gradient
                break
        else:
            break
    return theta, None
