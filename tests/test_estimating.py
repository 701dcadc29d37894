"""One fit per checkpoint of a run, against the theory of early stopping."""

import re

import pytest
import torch
from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import theory
from tacit.estimating import time_varying

STEP = 0.05


def linear_objective(data):
    return tacit.Objective(nn.Linear(5, 1, bias=False).double(), F.mse_loss, data)


def test_time_varying_gives_one_fit_per_checkpoint():
    X, y = random_data(8)
    objective = linear_objective((X, y))
    theta, checkpoints = torch.zeros(5, 1, dtype=torch.float64), {}
    for t in range(1, 31):
        theta = theta + STEP / len(X) * X.T @ (y - X @ theta)
        if t in (1, 10, 30):
            checkpoints[t] = {"weight": theta.T}
    fits = time_varying(objective, checkpoints, tacit.l2())
    assert list(fits) == [1, 10, 30]
    for t, fit in fits.items():
        matrix, theta = theory.early_stopping(X, STEP, t), checkpoints[t]["weight"][0]
        expected = float(theta @ matrix @ theta / (theta @ theta))
        assert fit.strengths["l2"] == pytest.approx(expected, rel=1e-9)
    with_known = time_varying(objective, checkpoints, tacit.l2(), known={tacit.l2(): 0.1})
    assert with_known[10].strengths["l2"] == pytest.approx(fits[10].strengths["l2"] - 0.1)


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [
        ({}, "checkpoints is empty"),
        ([{}], "checkpoints is a list"),
        ({3: None}, "checkpoint 3 is None"),
        ({"end": {"weight": torch.ones(1, 2)}}, "checkpoint 'end'"),
    ],
)
def test_wrong_checkpoints_are_refused(checkpoints, message):
    objective = linear_objective(random_data(0))
    with pytest.raises(tacit.InputError, match=re.escape(message)):
        time_varying(objective, checkpoints, tacit.l2())
    with pytest.raises(tacit.InputError, match="an objective is a NoneType"):
        time_varying(None, {1: {}}, tacit.l2())
