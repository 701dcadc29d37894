"""Gradients of modules at several endpoints at once are those of one at a time."""

import torch
from support.systems import draw
from torch import nn

from tacit.fitting import module_gradients
from tacit.fitting.module_gradients import (
    Endpoint,
    ScaledModule,
    flatten,
    gradient_of,
    stack_endpoints,
)


class Penalty(nn.Module):
    """Σ of a function of each weight, and of the norm of each tensor."""

    def __init__(self, branches=False):
        super().__init__()
        self.a, self.branches = nn.Parameter(torch.tensor(0.7).double()), branches

    def forward(self, params):
        total = sum((self.a * p).cosh().sum() + p.norm() for p in params.values())
        return 2 * total if self.branches and params["w"].sum() > 0 else total


def endpoint(seed, rows=3):
    params = {"w": draw(seed, rows, 2), "b": draw(seed + 1, 4), "unused": draw(seed + 2, 2)}
    names = ("b", "w")
    vector = {n: draw(seed + 3, *params[n].shape) for n in names}
    return Endpoint(params, [vector], flatten(vector, names), names)


def square_and_derivative(module, endpoints):
    """Σ ‖∇R_φ − target‖² and its derivative by φ."""
    total = sum((gradient_of(module, e) - e.mean).square().sum() for e in endpoints)
    return torch.stack([total, *torch.autograd.grad(total, list(module.parameters()))])


def test_stacked_endpoints_have_the_same_square_and_derivative():
    module = ScaledModule(Penalty(), 3.0)
    endpoints = [endpoint(seed, rows) for seed, rows in ((0, 3), (10, 5), (20, 3), (30, 3))]
    stacked = stack_endpoints(module, endpoints)
    assert [e.stacked for e in stacked] == [True, False]
    assert sum(e.rows for e in stacked) == sum(e.rows for e in endpoints)
    expected = square_and_derivative(module, endpoints)
    torch.testing.assert_close(square_and_derivative(module, stacked), expected)


def test_a_module_that_branches_has_one_endpoint_at_a_time():
    endpoints = [endpoint(seed) for seed in (0, 10)]
    assert stack_endpoints(ScaledModule(Penalty(branches=True), 1.0), endpoints) == endpoints


def test_large_endpoints_stay_apart(monkeypatch):
    monkeypatch.setattr(module_gradients, "TOGETHER", 24)  # each has 12 parameters
    stacked = stack_endpoints(ScaledModule(Penalty(), 1.0), [endpoint(s) for s in range(5)])
    assert [e.rows for e in stacked] == [20, 20, 10]
