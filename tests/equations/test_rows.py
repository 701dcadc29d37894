"""Rows of the design are read in slices, assigned to layers and stored in a few numbers."""

import pytest
import torch
from support.candidates import dense_rows, make_candidates, network_with_objective
from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.equations import rows


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**21])
def test_slices_of_any_size_give_the_dense_inner_products(chunk, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK", chunk)
    model, data, objective = network_with_objective()
    equations = tacit.endpoint_equations(objective, make_candidates())
    dense = dense_rows(model, data, make_candidates())
    factor = equations.factor()
    torch.testing.assert_close(factor.T @ factor, dense.T @ dense, rtol=1e-11, atol=1e-13)
    assert equations.rows == len(dense)


def test_a_block_holds_a_few_numbers_for_any_parameter_count():
    _, _, objective = network_with_objective(sizes=(5, 300, 300, 1))
    equations = tacit.endpoint_equations(objective, make_candidates())
    assert equations.rows > 90_000
    assert sum(block.factor.numel() for block in equations.blocks) <= 3 * 4 * 4


def test_parametrised_weights_belong_to_their_layer():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), nn.Linear(3, 1))
    objective = tacit.Objective(model.double(), F.mse_loss, random_data(10))
    assert tacit.endpoint_equations(objective, [tacit.l2()]).layers == ("0", "1")
