"""Exact optima of networks under a lasso: some weights are exactly zero."""

import numpy as np
import torch
from scipy.optimize import minimize
from torch.nn import functional as F

from support.models import load, loss_of, params_of


def train_to_lasso_optimum(model, data, ridge, lasso):
    """Load the weights of an optimum of L + ridge‖θ‖² + lasso‖θ‖₁; return the largest |∇(L + R)|.

    With θ = a − b, a and b ≥ 0, the penalty is smooth, lasso·Σ(a + b): bounded L-BFGS finds which
    weights are zero, and Newton's method the others.
    """
    shapes = {n: p.shape for n, p in params_of(model).items()}
    sizes = [shape.numel() for shape in shapes.values()]
    mean_loss = loss_of(model, F.mse_loss, data)

    def unflatten(theta):
        parts = zip(shapes.items(), theta.split(sizes), strict=True)
        return {n: part.reshape(shape) for (n, shape), part in parts}

    def smooth(theta):
        return mean_loss(unflatten(theta)) + ridge * theta.square().sum()

    gradient = torch.func.grad(smooth)
    hessian = torch.func.jacrev(gradient)
    start = torch.cat([p.flatten() for p in params_of(model).values()])

    def value_and_gradient(both):
        a, b = torch.from_numpy(both).split(len(start))
        slope = gradient(a - b)
        value = float(smooth(a - b)) + lasso * both.sum()
        return value, torch.cat([slope + lasso, lasso - slope]).numpy()

    both = torch.cat([start.clamp_min(0), (-start).clamp_min(0)]).numpy()
    options = {"maxiter": 1000, "maxfun": 1500, "ftol": 0.0, "gtol": 1e-6, "maxcor": 30}
    bounds = [(0, np.inf)] * len(both)
    found = minimize(
        value_and_gradient, both, jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    a, b = torch.from_numpy(found.x).split(len(start))
    theta = a - b
    for _ in range(8):
        free, signs = theta != 0, theta.sign()
        step = torch.zeros_like(theta)
        slope = (gradient(theta) + lasso * signs)[free]
        step[free] = torch.linalg.solve(hessian(theta)[free][:, free], slope)
        theta = torch.where((theta - step).sign() == signs, theta - step, 0.0)
    load(model, unflatten(theta))
    return float((gradient(theta) + lasso * theta.sign())[theta != 0].abs().max())
