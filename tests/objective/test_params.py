"""Derivatives are taken at the parameters that are passed, whatever the model does with them."""

import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tacit


class Checkpointed(nn.Module):
    """Runs its first half a second time during the backward pass."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        first, activation, last = self.model
        return last(checkpoint(lambda z: activation(first(z)), x, use_reentrant=False))


def test_activation_checkpointing_sees_the_same_parameters_in_the_backward_pass():
    model, data = tanh_mlp(0), random_data(0)
    plain = tacit.Objective(model, F.mse_loss, data)
    checkpointed = tacit.Objective(Checkpointed(model), F.mse_loss, data)
    params = {n: p + 0.5 for n, p in params_of(model).items()}
    prefixed = {f"model.{n}": p for n, p in params.items()}
    for name, expected in plain.gradient(params).items():
        torch.testing.assert_close(checkpointed.gradient(prefixed)[f"model.{name}"], expected)
    product = checkpointed.hvp(prefixed, prefixed)
    for name, expected in plain.hvp(params, params).items():
        torch.testing.assert_close(product[f"model.{name}"], expected)


def test_tied_weights_may_be_passed_under_all_their_names_if_these_agree():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    model[2].weight = model[0].weight
    X, _ = random_data(9)
    objective = tacit.Objective(model, F.mse_loss, (X, X))
    params = {n: p + 0.1 for n, p in model.state_dict().items()}
    assert "2.weight" in params
    assert objective.value(params) != objective.value()
    params["2.weight"] = params["2.weight"] + 1
    with pytest.raises(tacit.InputError, match=r"unknown 2\.weight"):
        objective.value(params)
