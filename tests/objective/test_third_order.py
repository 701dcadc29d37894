"""vᵀHv and its gradient against dense third derivatives and finite differences."""

import copy

import pytest
import torch
from support.hard_to_differentiate import NativeLayerNorm
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.objective.third_order import random_signs

DATA = random_data(1, count=11, inputs=3, outputs=2)


def directions_of(params, count=3):
    return [random_signs(params, tuple(params), seed=seed) for seed in range(count)]


def dense_curvature(model, params, directions):
    """Σ_v vᵀHv with the dense Hessian."""
    hessian = reference.hessian(loss_of(model, F.mse_loss, DATA), params)
    vectors = [reference.flat(v) for v in directions]
    return sum(float(v @ hessian @ v) for v in vectors)


def differences(function, params, step=1e-5):
    """The gradient of a function of the parameters by central differences."""
    vector = reference.flat(params)
    columns = []
    for unit in torch.eye(len(vector), dtype=torch.float64):
        ahead, behind = (
            function(reference.unflatten(vector + sign * step * unit, params)) for sign in (1, -1)
        )
        columns.append((ahead - behind) / (2 * step))
    return torch.tensor(columns, dtype=torch.float64)


def normed(norm, activation=None):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), norm, activation or nn.Tanh(), nn.Linear(4, 2)).double()


def test_curvature_and_its_gradient_are_those_of_the_dense_hessian():
    model = tanh_mlp(0, sizes=(3, 4, 2))
    objective = tacit.Objective(model, F.mse_loss, DATA, batch_size=4)
    params = params_of(model)
    directions = directions_of(params, count=6)
    expected = dense_curvature(model, params, directions)
    assert objective.curvature(directions, params) == pytest.approx(expected, rel=1e-12)
    gradient = reference.flat(objective.curvature_gradient(directions, params))
    by_differences = differences(lambda p: dense_curvature(model, p, directions), params)
    torch.testing.assert_close(gradient, by_differences, rtol=1e-7, atol=1e-7)


NORMS = {"layer": nn.LayerNorm(4), "native": NativeLayerNorm(4), "group": nn.GroupNorm(2, 4)}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_third_derivatives_are_right_through_fused_norms(norm, dtype):
    model = normed(copy.deepcopy(norm))
    exact = tacit.Objective(model, F.mse_loss, DATA)
    params = exact.point()
    directions = directions_of(params, count=1)
    expected = differences(lambda p: exact.curvature(directions, p), params)
    data = tuple(t.to(dtype) for t in DATA)
    objective = tacit.Objective(copy.deepcopy(model).to(dtype), F.mse_loss, data)
    found = objective.curvature_gradient([{n: v.to(dtype) for n, v in directions[0].items()}])
    tolerance = 1e-5 if dtype == torch.float64 else 1e-3
    error = (reference.flat(found) - expected).norm() / expected.norm()
    assert error < tolerance


def test_third_derivatives_are_right_through_batch_norm_of_batches():
    model = normed(nn.BatchNorm1d(4))
    objective = tacit.Objective(model, F.mse_loss, DATA, batch_size=11, batch_norm="batch")
    params = objective.point()
    directions = directions_of(params, count=1)
    expected = differences(lambda p: objective.curvature(directions, p), params, step=1e-4)
    found = reference.flat(objective.curvature_gradient(directions, params))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.norm()))


def test_kinks_beside_a_fused_norm_are_refused():
    """A step across a kink changes the Hessian by a jump, which no difference resolves."""
    torch.manual_seed(0)
    norm = NativeLayerNorm(64)
    model = nn.Sequential(nn.Linear(3, 64), norm, nn.ReLU(), nn.Linear(64, 1)).double()
    X, y = random_data(2, count=500, inputs=3)
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    with pytest.raises(tacit.InputError, match=r"third derivatives .* wrong in 0.*kinks"):
        objective.curvature_gradient(directions_of(objective.point(), count=1))


class InSinglePrecision(nn.Module):
    def forward(self, x):
        return x.float()


def test_norms_whose_third_derivatives_cannot_be_compared_are_refused():
    """Differences in float64 are not possible, and those of torch are wrong."""
    single = nn.Sequential(InSinglePrecision(), nn.GroupNorm(2, 4), nn.Tanh()).float()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), single, nn.Linear(4, 2))
    data = tuple(t.float() for t in DATA)
    objective = tacit.Objective(model, F.mse_loss, data, batch_size=4)
    directions = directions_of(objective.point(), count=1)
    with pytest.raises(tacit.InputError, match=r"wrong in 1\.1.*less than float64"):
        objective.curvature_gradient(directions)


def test_a_loss_without_third_derivatives_has_a_zero_gradient():
    model = nn.Linear(3, 2).double()
    objective = tacit.Objective(model, F.mse_loss, DATA)
    gradient = objective.curvature_gradient(directions_of(objective.point()))
    assert not reference.flat(gradient).any()
