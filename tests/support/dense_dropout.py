"""The explicit dropout regularizer from dense Jacobians and Hessians, one example at a time."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from support.models import random_data
from tacit import reference


def dropout_mlp(seed=0, sizes=(4, 6, 5, 3), rate=0.1):
    """An MLP with tanh and dropout after each hidden layer."""
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh(), nn.Dropout(rate)]
    return nn.Sequential(*layers[:-2]).double()


def class_data(seed=0, count=7, inputs=4, classes=3):
    X, _ = random_data(seed, count=count, inputs=inputs)
    return X, torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


def split_at_dropout(model):
    """The parts of a sequential model before and behind each of its dropout layers.

    They are functions front(params, x), which gives the layer's input h, and back(params, h, x),
    which gives the outputs.
    """
    model.eval()

    def call(part, params, x):
        part_params = {n: params[n] for n, _ in part.named_parameters()}
        return functional_call(part, part_params, (x,))

    return [
        (
            lambda params, x, front=model[:i]: call(front, params, x),
            lambda params, h, x, back=model[i + 1 :]: call(back, params, h),
        )
        for i, layer in enumerate(model)
        if isinstance(layer, nn.Dropout)
    ]


def gauss_newton(params, back, loss, h, x, y):
    """JᵀHJ of one example."""
    z = back(params, h, x)
    J = jacobian(lambda h: back(params, h, x), h, create_graph=True).reshape(z.numel(), h.numel())
    H = hessian(lambda z: loss(z, y), z, create_graph=True).reshape(z.numel(), z.numel())
    return J.T @ H @ J


def full_hessian(params, back, loss, h, x, y):
    """∇²_h of one example's loss: JᵀHJ, and the curvature of the network behind the layer."""
    matrix = hessian(lambda h: loss(back(params, h, x), y), h, create_graph=True)
    return matrix.reshape(h.numel(), h.numel())


def dense_penalties(sides, loss, data, *, matrix=gauss_newton):
    """One function of the parameters per layer, ½ mean_i Σ_j h_j² M_jj with M from `matrix`."""

    def value(params, front, back):
        total = 0
        for x, y in zip(data[0].split(1), data[1].split(1), strict=True):
            h = front(params, x)
            curvature = matrix(params, back, loss, h, x, y).diagonal()
            total = total + (h.flatten() ** 2 * curvature).sum() / 2
        return total / len(data[0])

    return [lambda params, sides=pair: value(params, *sides) for pair in sides]


def assert_equal_to_dense(regularizer, params, functions, *, rtol=1e-10):
    """Values and gradients equal those of the dense functions, one function per column."""
    columns = regularizer.gradient(params)
    values = regularizer.value(params)
    for column, value, function in zip(columns.values(), values, functions, strict=True):
        assert float(value) == pytest.approx(float(function(params).detach()), rel=rtol)
        expected = reference.gradient(function, params)
        torch.testing.assert_close(reference.flat(column), expected, rtol=rtol, atol=1e-12)


def flat_gradient(regularizer, params):
    """The only column of a regularizer as one vector."""
    return reference.flat(regularizer.gradient(params)[regularizer.name])
