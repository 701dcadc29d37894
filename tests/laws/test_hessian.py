"""Laws of the trace of the Hessian."""

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch.func import functional_call
from torch.nn import functional as F

import tacit
from tacit.regularizers import hessian_trace


def test_gaussian_weight_noise_penalises_half_its_variance_times_the_trace_of_the_hessian():
    """E L(θ + σz) = L(θ) + (σ²/2) tr H(θ) + O(σ⁴)."""
    model, data, sigma = tanh_mlp(1, sizes=(4, 6, 1)), random_data(2, count=40, inputs=4), 0.02

    def with_noise(model, batch, noise):
        moved = {n: p + sigma * noise.normal(p) for n, p in model.named_parameters()}
        return F.mse_loss(functional_call(model, moved, batch[0]), batch[1], reduction="none")[:, 0]

    plain = tacit.Objective(model, F.mse_loss, data)
    noisy = tacit.Objective.from_batch_loss(model, with_noise, data, training=True, draws=1024)
    fit = tacit.fit(tacit.difference_equations(noisy, plain, hessian_trace(plain)))
    low, high = fit.intervals()["draws"]["hessian_trace"]
    assert fit.strengths["hessian_trace"] / (sigma**2 / 2) == pytest.approx(1, abs=0.1)
    assert low < sigma**2 / 2 < high
    assert not fit.problems


def test_linear_regression_has_no_curvature_to_penalise():
    """Its Hessian is XᵀX/n at all weights: tr H is constant, and a Problem says so."""
    model, data = torch.nn.Linear(4, 1).double(), random_data(2, count=40, inputs=4)
    fit = tacit.estimate(
        model, F.mse_loss, data, [hessian_trace(tacit.Objective(model, F.mse_loss, data))]
    )
    assert any(problem.kind == "unidentified" for problem in fit.problems)
