"""The coefficients of θᵀΛθ: their names, their norm, and the matrix that one endpoint gives."""

import pytest
import torch
from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.regularizers.quadratic import quadratic_matrix


def test_coefficients_are_named_after_single_coordinates():
    params = {"l.weight": torch.ones(2, 2), "scale": torch.ones(())}
    assert tacit.regularizers.diagonal().bind(params).names == (
        "diagonal[l.weight[0,0]]",
        "diagonal[l.weight[0,1]]",
        "diagonal[l.weight[1,0]]",
        "diagonal[l.weight[1,1]]",
        "diagonal[scale]",
    )
    names = tacit.regularizers.symmetric().bind(params).names
    assert "symmetric[l.weight[0,0],l.weight[0,1]]" in names


def test_coefficients_of_symmetric_have_the_norm_of_their_matrix():
    theta = torch.tensor([0.3, -2.0, 1.1], dtype=torch.float64)
    coefficients = torch.tensor([1.0, 2, -3, 4, 0.5, -6], dtype=torch.float64)
    matrix = quadratic_matrix(coefficients, "symmetric")
    assert torch.equal(matrix, matrix.T)
    assert float(matrix.norm()) == pytest.approx(float(coefficients.norm()), rel=1e-14)
    form = tacit.regularizers.symmetric().value({"w": theta}) @ coefficients
    assert float(form) == pytest.approx(float(theta @ matrix @ theta), rel=1e-14)


def test_one_endpoint_gives_the_symmetric_matrix_of_least_frobenius_norm():
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    objective = tacit.Objective(model, F.mse_loss, random_data(1, inputs=4))
    matrix = tacit.fit(tacit.endpoint_equations(objective, tacit.regularizers.symmetric())).matrix()
    theta, b = model.weight.detach()[0], -objective.gradient()["weight"][0] / 2
    # Among all symmetric Λ with Λθ = b, this one has the least Frobenius norm.
    norm_squared = theta @ theta
    least = b.outer(theta) + theta.outer(b) - (theta @ b) * theta.outer(theta) / norm_squared
    torch.testing.assert_close(matrix, least / norm_squared, rtol=1e-10, atol=1e-12)
