"""Batches, losses, models with dropout and comparisons for the tests of objectives."""

import torch
from torch import nn
from torch.nn import functional as F

import tacit
from support.models import random_data, tanh_mlp
from tacit import Objective, reference

IGNORED = -100
"""The target that cross-entropy ignores."""


def assert_close(actual, expected, *, tolerance):
    """Compare vectors, or dictionaries of tensors, by the norm of their difference."""
    a, b = (reference.flat(t) if isinstance(t, dict) else t for t in (actual, expected))
    error = float((a - b).norm() / b.norm())
    assert error <= tolerance, f"relative error {error:.1e}"


def split_batches(X, y, size=7):
    """Batches (inputs, target) of this size; the last may be smaller."""
    return list(zip(X.split(size), y.split(size), strict=True))


def random_batches(seed, sizes=(9, 9, 2)):
    """Batches (inputs, target) of these sizes."""
    X, y = random_data(seed, count=sum(sizes))
    return list(zip(X.split(sizes), y.split(sizes), strict=True))


class CountedBatches:
    """Batches, and how often a pass over them was started."""

    def __init__(self, batches):
        self.batches, self.passes = batches, 0

    def __iter__(self):
        self.passes += 1
        yield from self.batches


def squared_errors(model, batch):
    """The mean squared error of each example of a batch {"x": inputs, "y": target}."""
    return (model(batch["x"]) - batch["y"]).square().mean(1)


def dropout_mlp(seed=0):
    model = tanh_mlp(seed)
    return nn.Sequential(model[0], model[1], nn.Dropout(0.5), model[2])


def dropout_objective(data, *, model=None, **options):
    """An objective in training mode, by default of a network with dropout."""
    return Objective(model or dropout_mlp(), F.mse_loss, data, training=True, **options)


def gradient_of(model, loss):
    """∇ of a scalar made from the model, by name, by plain autograd."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True)
    return {name: gradient for name, gradient in gradients if gradient is not None}


def strength(model, loss):
    """The strength of l2 that plain autograd gives: −⟨∇L, 2θ⟩ / ‖2θ‖²."""
    gradient = gradient_of(model, loss)
    columns = {name: 2 * p.detach() for name, p in model.named_parameters() if name in gradient}
    products = sum((gradient[name] * column).sum() for name, column in columns.items())
    return float(-products / sum(column.square().sum() for column in columns.values()))


def fit_l2(objective):
    """The endpoint fit with l2 as its only candidate."""
    return tacit.fit(tacit.endpoint_equations(objective, tacit.l2()))
