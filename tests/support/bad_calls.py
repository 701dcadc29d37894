"""A small objective and its relatives, for tables of wrong calls."""

import math

import pytest
import torch
from torch.nn import functional as F

from support.models import params_of, random_data, tanh_mlp
from tacit import InputError, Objective

X, Y = random_data(1, count=8)
NAN, INF = math.nan, math.inf
MODEL = tanh_mlp(0)
PARAMS = params_of(MODEL)
WRONG_SHAPE = {**PARAMS, "2.bias": torch.zeros(4)}
OBJECTIVE = Objective(MODEL, F.mse_loss, (X, Y))


def with_value(tensor, value, index=0):
    """A copy of the tensor with one number replaced."""
    tensor = tensor.clone()
    tensor.view(-1)[index] = value
    return tensor


def params_with(value, name="2.bias"):
    """The model's parameters with one number replaced."""
    return {**PARAMS, name: with_value(PARAMS[name], value)}


def make_objective(data=(X, Y), *, model=MODEL, loss=F.mse_loss, **options):
    return Objective(model, loss, data, **options)


def assert_refused(call, names, remedy):
    """The call raises InputError, whose message holds every word of `names` and the remedy."""
    with pytest.raises(InputError) as error:
        call()
    for words in (*names, remedy):
        assert words in str(error.value)
