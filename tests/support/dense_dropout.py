"""The explicit dropout regularizer from whole Jacobians and Hessians, an example at a time."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from support.problems import random_data
from tacit import reference


def network(seed=0, sizes=(4, 6, 5, 3), rate=0.1):
    """Tanh, and dropout after each hidden layer."""
    torch.manual_seed(seed)
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh(), nn.Dropout(rate)]
    return nn.Sequential(*layers[:-2]).double()


def class_data(seed=0, count=7, inputs=4, classes=3):
    X, _ = random_data(seed, count=count, inputs=inputs)
    return X, torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


def halves(model):
    """The two sides of every dropout layer of a sequential model, as functions of (params, …)."""
    model.eval()
    return [
        (
            lambda params, x, front=model[:i]: functional_call(front, own(front, params), (x,)),
            lambda params, h, x, back=model[i + 1 :]: functional_call(
                back, own(back, params), (h,)
            ),
        )
        for i, layer in enumerate(model)
        if isinstance(layer, nn.Dropout)
    ]


def own(part, params):
    return {n: params[n] for n, _ in part.named_parameters()}


def gauss_newton(params, back, loss, h, x, y):
    """JᵀHJ of one example, whole."""
    z = back(params, h, x)
    J = jacobian(lambda h: back(params, h, x), h, create_graph=True).reshape(z.numel(), h.numel())
    H = hessian(lambda z: loss(z, y), z, create_graph=True).reshape(z.numel(), z.numel())
    return J.T @ H @ J


def whole_hessian(params, back, loss, h, x, y):
    """∇² of one example's loss by what enters the layer: JᵀHJ, and what the network bends."""
    bent = hessian(lambda h: loss(back(params, h, x), y), h, create_graph=True)
    return bent.reshape(h.numel(), h.numel())


def naive(sides, loss, data, *, matrix=gauss_newton):
    """R of every layer as a function of the parameters, an example at a time."""

    def value(params, front, back):
        total = 0
        for x, y in zip(data[0].split(1), data[1].split(1), strict=True):
            h = front(params, x)
            bend = matrix(params, back, loss, h, x, y).diagonal()
            total = total + (h.flatten() ** 2 * bend).sum() / 2
        return total / len(data[0])

    return [lambda params, sides=two: value(params, *sides) for two in sides]


def check(regularizer, params, functions, *, rtol=1e-10):
    """Values and gradients equal those of the dense functions, one a column."""
    columns = regularizer.gradient(params)
    values = regularizer.value(params)
    for column, value, function in zip(columns.values(), values, functions, strict=True):
        assert float(value) == pytest.approx(float(function(params).detach()), rel=rtol)
        expected = reference.gradient(function, params)
        torch.testing.assert_close(reference.flat(column), expected, rtol=rtol, atol=1e-12)


def gradient(regularizer, params):
    return reference.flat(regularizer.gradient(params)[regularizer.name])
