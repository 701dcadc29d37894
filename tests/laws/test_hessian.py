"""Laws of the trace of the Hessian."""

import torch
from support.models import random_data
from torch.nn import functional as F

import tacit
from tacit.regularizers import hessian_trace


def test_linear_regression_has_no_curvature_to_penalise():
    """Its Hessian is XᵀX/n at all weights: tr H is constant, and a Problem says so."""
    model, data = torch.nn.Linear(4, 1).double(), random_data(2, count=40, inputs=4)
    fit = tacit.estimate(
        model, F.mse_loss, data, [hessian_trace(tacit.Objective(model, F.mse_loss, data))]
    )
    assert any(problem.kind == "unidentified" for problem in fit.problems)
