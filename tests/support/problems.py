"""Small models, data and exact optima that several test files share."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import tacit
from tacit import reference

Params = dict[str, Tensor]


def random_data(seed, count=64, inputs=5, outputs=1, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
    W = torch.randn(inputs, outputs, generator=generator, dtype=torch.float64)
    return X, X @ W + noise * torch.randn(count, outputs, generator=generator, dtype=torch.float64)


def tanh_mlp(seed, sizes=(5, 8, 1)):
    torch.manual_seed(seed)
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def small_cnn(seed):
    """Tanh, average pooling, and a batch norm whose running statistics are not trivial."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 4),
    ).double()
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
    return model.eval()


def image_data(seed, count=60, classes=4):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (count,), generator=generator)
    X = torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64)
    return X + y[:, None, None, None] * 0.3, y


def loss_of(model, loss, data):
    """The dense loss as a function of the parameters, in eval mode."""
    *inputs, target = data
    model.eval()
    return lambda params: loss(functional_call(model, params, tuple(inputs)), target)


def params_of(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@dataclass
class Optimum:
    params: Params
    stationarity: float
    """‖∇(L+R)‖ / ‖∇L‖."""


def minimise(model, loss, data, penalties, *, tolerance=1e-8):
    """Bring a model to an optimum of L + Σ λ R: L-BFGS, then damped Newton, in float64."""
    shapes = {n: p.shape for n, p in params_of(model).items()}
    sizes = [s.numel() for s in shapes.values()]
    dense = loss_of(model, loss, data)

    def unflat(vector):
        parts = zip(shapes.items(), vector.split(sizes), strict=True)
        return {n: part.reshape(shape) for (n, shape), part in parts}

    def total(params):
        return dense(params) + sum((r.value(params) * s).sum() for r, s in penalties.items())

    def slope(vector):
        return reference.gradient(total, unflat(vector))

    def both(x):
        vector = torch.from_numpy(x)
        return float(total(unflat(vector))), slope(vector).numpy()

    x = reference.flat(params_of(model))
    for _ in range(3):
        found = minimize(
            both, x.numpy(), jac=True, method="L-BFGS-B",
            options={"maxiter": 5000, "maxfun": 20000, "gtol": 1e-12, "ftol": 1e-16},
        )  # fmt: skip
        x = torch.from_numpy(found.x)
    x = newton(total, unflat, x)
    params = unflat(x)
    ratio = float(slope(x).norm() / reference.gradient(dense, params).norm())
    assert ratio <= tolerance, f"not an optimum: ‖∇(L+R)‖/‖∇L‖ = {ratio:.1e}"
    load(model, params)
    return Optimum(params, ratio)


def newton(total, unflat, x, steps=40):
    """Damped Newton on ‖∇f‖: a step is taken only if it lowers the gradient's norm."""
    slope = reference.gradient(total, unflat(x))
    damping = 1e-8
    for _ in range(steps):
        if slope.norm() < 1e-13:
            break
        hessian = reference.hessian(total, unflat(x))
        while damping < 1e6:
            step = torch.linalg.lstsq(
                hessian + damping * torch.eye(len(x), dtype=x.dtype), slope[:, None]
            ).solution[:, 0]
            ahead = reference.gradient(total, unflat(x - step))
            if ahead.norm() < slope.norm():
                x, slope, damping = x - step, ahead, max(damping / 10, 1e-15)
                break
            damping *= 10
        else:
            break
    return x


def load(model, params):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in params:
                parameter.copy_(params[name])


def elastic_net(strengths=(2e-2, 1e-2), beta=1e-3):
    ridge, lasso = strengths
    return {tacit.l2(): ridge, tacit.smooth_l1(beta): lasso}


LOSSES = {"mse": F.mse_loss, "cross_entropy": F.cross_entropy}
