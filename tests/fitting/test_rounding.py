"""Low precision is told apart from a target without a signal."""

import pytest
import torch
from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit


def test_a_good_fit_in_bfloat16_is_not_reported_as_no_signal():
    torch.manual_seed(5)
    X, y = random_data(5, count=400, inputs=300)
    strength = 0.3
    gram = X.T @ X / 400 + strength * torch.eye(300).double()
    theta = torch.linalg.solve(gram, X.T @ y / 400).T
    model = nn.Linear(300, 1, bias=False).bfloat16()
    objective = tacit.Objective(model, F.mse_loss, (X.bfloat16(), y.bfloat16()))
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params={"weight": theta}))
    assert fit.explained > 0.95
    assert "no signal" not in {problem.kind for problem in fit.problems}
    assert fit.strengths["l2"] == pytest.approx(strength, rel=0.05)
