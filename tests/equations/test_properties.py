"""Strengths do not depend on batches, on the order of parameters, or on the scale of a column."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tacit

SEEDS = st.integers(0, 10_000)
quick = settings(max_examples=25, deadline=None, derandomize=True)


def make_regularizers():
    return [tacit.l2(), tacit.smooth_l1(1e-2), tacit.l2(scope="2", name="last")]


def strengths_of(objective, regularizers=None):
    fit = tacit.fit(tacit.endpoint_equations(objective, regularizers or make_regularizers()))
    assert fit.condition < 1e3
    return torch.tensor(list(fit.strengths.values()), dtype=torch.float64)


def assert_equal(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@quick
@given(seed=SEEDS, size=st.integers(1, 70))
def test_the_batch_size_does_not_change_the_strengths(seed, size):
    model, data = tanh_mlp(seed), random_data(seed)
    expected = strengths_of(tacit.Objective(model, F.mse_loss, data))
    assert_equal(strengths_of(tacit.Objective(model, F.mse_loss, data, batch_size=size)), expected)


@quick
@given(seed=SEEDS, cuts=st.lists(st.integers(1, 63), min_size=1, max_size=5, unique=True))
def test_ragged_batches_in_any_order_do_not_change_the_strengths(seed, cuts):
    model, (X, y) = tanh_mlp(seed), random_data(seed)
    edges = [0, *sorted(cuts), len(X)]
    batches = [(X[a:b], y[a:b]) for a, b in pairwise(edges)][::-1]
    expected = strengths_of(tacit.Objective(model, F.mse_loss, (X, y)))
    assert_equal(strengths_of(tacit.Objective(model, F.mse_loss, batches)), expected)


@quick
@given(seed=SEEDS, size=st.integers(1, 70), shuffle=st.booleans())
def test_a_loader_gives_the_strengths_of_tensors(seed, size, shuffle):
    model, data = tanh_mlp(seed), random_data(seed)
    loader = DataLoader(TensorDataset(*data), batch_size=size, shuffle=shuffle)
    expected = strengths_of(tacit.Objective(model, F.mse_loss, data))
    assert_equal(strengths_of(tacit.Objective(model, F.mse_loss, loader)), expected)


@quick
@given(seed=SEEDS, times=st.integers(2, 4))
def test_duplicated_data_does_not_change_the_strengths(seed, times):
    model, data = tanh_mlp(seed), random_data(seed)
    expected = strengths_of(tacit.Objective(model, F.mse_loss, data))
    repeated = tuple(torch.cat([part] * times) for part in data)
    assert_equal(strengths_of(tacit.Objective(model, F.mse_loss, repeated)), expected)


class ReversedOrder(nn.Module):
    """The same network with its parameters registered in the opposite order."""

    def __init__(self, model):
        super().__init__()
        self.layers = nn.ModuleDict({"2": model[2], "0": model[0]})

    def forward(self, x):
        return self.layers["2"](torch.tanh(self.layers["0"](x)))


@quick
@given(seed=SEEDS)
def test_the_order_of_parameters_does_not_change_the_strengths(seed):
    model, data = tanh_mlp(seed), random_data(seed)
    regularizers = [tacit.l2(), tacit.smooth_l1(1e-2), tacit.l2(scope="layers.2", name="last")]
    expected = strengths_of(tacit.Objective(model, F.mse_loss, data))
    assert_equal(
        strengths_of(tacit.Objective(ReversedOrder(model), F.mse_loss, data), regularizers),
        expected,
    )


@quick
@given(seed=SEEDS, factor=st.floats(1e-6, 1e6))
def test_rescaling_a_regularizer_rescales_only_its_strength(seed, factor):
    model, data = tanh_mlp(seed), random_data(seed)
    objective = tacit.Objective(model, F.mse_loss, data)

    def scaled(params):
        return factor * sum(p.square().sum() for p in params.values())

    expected = strengths_of(objective)
    rescaled = strengths_of(
        objective, [tacit.regularizer("scaled", scaled), *make_regularizers()[1:]]
    )
    assert_equal(rescaled * torch.tensor([factor, 1, 1], dtype=torch.float64), expected)


@quick
@given(seed=SEEDS)
def test_stacking_an_endpoint_on_itself_does_not_change_the_strengths(seed):
    objective = tacit.Objective(tanh_mlp(seed), F.mse_loss, random_data(seed))
    once = tacit.endpoint_equations(objective, make_regularizers())
    twice = tacit.fit(tacit.stack([once, once]))
    single = tacit.fit(once)
    assert twice.rows == 2 * single.rows
    assert twice.explained == pytest.approx(single.explained, rel=1e-10)
    assert twice.strengths == pytest.approx(single.strengths, rel=1e-10)
