"""How precisely a gradient is known: by the least precise dtype that it is computed in."""

import math

import pytest
import torch
from support.models import random_data, tanh_mlp
from support.scoring import fit_and_score
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import Objective
from tacit.objective import rounding
from tacit.objective.derivatives import graph_dtypes


class Norm(nn.Module):
    """Inputs over their root mean square, which is computed in another dtype, as in Llama."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        wide = x.to(self.dtype)
        return (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(x)


def normed(dtype):
    model = tanh_mlp(0, (5, 6, 1))
    return nn.Sequential(*model[:2], Norm(dtype), model[2])


def level(objective):
    return math.hypot(*objective.rounding().values()) / math.hypot(
        *(float(g.norm()) for g in objective.gradient().values())
    )


def test_a_norm_layer_in_float32_inside_a_float64_model_is_no_sign_of_a_wrong_loss():
    data = random_data(0, count=7)  # two parts of 3 and 4, whose factors are rounded differently
    levels = {}
    for dtype in (torch.float64, torch.float32):
        objective = Objective(normed(dtype), F.mse_loss, data, batch_size=4)
        levels[dtype] = level(objective)
        _, scores = fit_and_score(objective, [tacit.l2()])
        assert scores.values.isfinite().all()
    assert 1e-17 < levels[torch.float64] < 1e-14
    assert 1e-9 < levels[torch.float32] < 1e-5


def test_a_loss_that_is_no_mean_is_refused_with_a_layer_in_float32_too():
    weights = torch.tensor([1.0, 5.0]).double()

    def class_weighted(output, target):
        weight = weights[(target > 0).long()]
        return (weight * (output - target).square()).sum() / weight.sum()

    with pytest.raises(tacit.InputError, match="not a mean over examples"):
        Objective(normed(torch.float32), class_weighted, random_data(0, count=30))


def test_sums_in_float32_are_known_to_float32():
    torch.manual_seed(0)
    X, y = torch.randn(600, 10).double() + 1, torch.randn(600, 1).double() + 3
    model = tanh_mlp(1, (10, 20, 1))
    wide, narrow = (
        Objective(model, F.mse_loss, (X, y), batch_size=1, accumulate=accumulate)
        for accumulate in ("float64", "float32")
    )
    assert level(wide) < 1e-14
    assert 1e-9 < level(narrow) < 1e-5
    # The strengths differ in the seventh digit, which is no sign of data that has changed.
    scores = [fit_and_score(o, [tacit.l2(), tacit.l1()])[1].values for o in (wide, narrow)]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-6)


def test_the_dtypes_of_a_graph():
    x = torch.ones(3, requires_grad=True)
    inside = (x.double() * 2).bfloat16().float()
    assert graph_dtypes(inside.sum()) == {torch.float32, torch.float64, torch.bfloat16}
    assert graph_dtypes(torch.ones(())) == set()


def test_where_few_examples_have_no_weight_the_whole_batch_is_taken(monkeypatch):
    torch.manual_seed(0)
    model = nn.Linear(600, 600).double()
    data = torch.randn(8, 600).double()
    weights = torch.tensor([0.0, 0, 0, 1, 0, 0, 0, 0]).double()

    def loss(model, batch):
        x, w = batch
        return (model(x) - x).square().mean(1), w[:, 0]

    batches = [(data, weights[:, None].expand(-1, 600))]
    objective = tacit.Objective.from_batch_loss(model, loss, batches)
    with torch.inference_mode():
        few = objective.rounding()
    monkeypatch.setattr(rounding, "FEWEST", 8)
    assert few == objective.rounding()
    assert all(0 < size < 1e-10 for size in few.values())
