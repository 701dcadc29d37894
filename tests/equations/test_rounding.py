"""Equations carry the level of rounding of the precision they were computed in."""

import torch
from support.models import random_data, tanh_mlp
from torch.nn import functional as F

import tacit


def test_autocast_raises_the_level_of_rounding():
    model = tanh_mlp(6).float()
    data = tuple(part.float() for part in random_data(6))
    objective = tacit.Objective(model, F.mse_loss, data)
    plain = tacit.endpoint_equations(objective, [tacit.l2()]).floor
    with torch.autocast("cpu", torch.bfloat16):
        autocast = tacit.endpoint_equations(objective, [tacit.l2()]).floor
    assert autocast > 1000 * plain
