"""Small models, small data sets and exact optima, shared by many tests."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import functional_call

import tacit
from tacit import reference

Params = dict[str, Tensor]


def random_data(seed, count=64, inputs=5, outputs=1, noise=0.3):
    """Gaussian inputs, and targets that are linear in them plus noise."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, inputs, generator=generator, dtype=torch.float64)
    W = torch.randn(inputs, outputs, generator=generator, dtype=torch.float64)
    return X, X @ W + noise * torch.randn(count, outputs, generator=generator, dtype=torch.float64)


def tanh_mlp(seed, sizes=(5, 8, 1)):
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


class UnusedHead(nn.Module):
    """A network with a head that its outputs do not depend on."""

    def __init__(self, body, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = body, nn.Linear(4, 2).double()

    def forward(self, x):
        return self.body(x)


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
    """Noise images with a brightness that depends on the class, and the classes."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (count,), generator=generator)
    X = torch.randn(count, 1, 8, 8, generator=generator, dtype=torch.float64)
    return X + y[:, None, None, None] * 0.3, y


def loss_of(model, loss, data):
    """The mean loss over all the data as a function of the parameters, in eval mode."""
    *inputs, target = data
    model.eval()
    return lambda params: loss(functional_call(model, params, tuple(inputs)), target)


def params_of(model):
    """Copies of the trainable parameters."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def load(model, params):
    """Copy the parameters into the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in params:
                parameter.copy_(params[name])


def elastic_net(strengths=(2e-2, 1e-2), beta=1e-3):
    """A ridge and a smoothed lasso with their strengths."""
    ridge, lasso = strengths
    return {tacit.l2(): ridge, tacit.smooth_l1(beta): lasso}


@dataclass
class Optimum:
    params: Params
    stationarity: float
    """‖∇(L+R)‖ / ‖∇L‖."""


def minimise(model, loss, data, penalties, *, tolerance=1e-8):
    """Train a model to an optimum of L + Σ λ R: L-BFGS, then damped Newton, in float64."""
    shapes = {n: p.shape for n, p in params_of(model).items()}
    sizes = [shape.numel() for shape in shapes.values()]
    mean_loss = loss_of(model, loss, data)

    def unflatten(vector):
        parts = zip(shapes.items(), vector.split(sizes), strict=True)
        return {n: part.reshape(shape) for (n, shape), part in parts}

    def penalised(params):
        penalty = sum((r.value(params) * strength).sum() for r, strength in penalties.items())
        return mean_loss(params) + penalty

    def gradient(vector):
        return reference.gradient(penalised, unflatten(vector))

    def value_and_gradient(x):
        vector = torch.from_numpy(x)
        return float(penalised(unflatten(vector))), gradient(vector).numpy()

    theta = reference.flat(params_of(model))
    for _ in range(3):
        minimum = minimize(
            value_and_gradient, theta.numpy(), jac=True, method="L-BFGS-B",
            options={"maxiter": 5000, "maxfun": 20000, "gtol": 1e-12, "ftol": 1e-16},
        )  # fmt: skip
        theta = torch.from_numpy(minimum.x)
    theta = newton(penalised, unflatten, theta)
    params = unflatten(theta)
    ratio = float(gradient(theta).norm() / reference.gradient(mean_loss, params).norm())
    assert ratio <= tolerance, f"not an optimum: ‖∇(L+R)‖/‖∇L‖ = {ratio:.1e}"
    load(model, params)
    return Optimum(params, ratio)


def newton(function, unflatten, theta, steps=40):
    """Damped Newton: a step is accepted only if it lowers the norm of the gradient."""
    gradient = reference.gradient(function, unflatten(theta))
    damping = 1e-8
    for _ in range(steps):
        if gradient.norm() < 1e-13:
            break
        hessian = reference.hessian(function, unflatten(theta))
        while damping < 1e6:
            step = torch.linalg.lstsq(
                hessian + damping * torch.eye(len(theta), dtype=theta.dtype), gradient[:, None]
            ).solution[:, 0]
            next_gradient = reference.gradient(function, unflatten(theta - step))
            if next_gradient.norm() < gradient.norm():
                theta, gradient, damping = theta - step, next_gradient, max(damping / 10, 1e-15)
                break
            damping *= 10
        else:
            break
    return theta


def batch_norm_mlp(seed):
    """A small network with batch norm, in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
