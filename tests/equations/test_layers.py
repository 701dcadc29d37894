"""Rows are assigned to the layers of the model."""

from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit


def test_parametrised_weights_belong_to_their_layer():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), nn.Linear(3, 1))
    objective = tacit.Objective(model.double(), F.mse_loss, random_data(10))
    assert tacit.endpoint_equations(objective, [tacit.l2()]).layers == ("0", "1")
