"""A small network, its objective, and three candidates whose columns are not collinear."""

import torch
from torch.nn import functional as F

import tacit
from support.models import loss_of, params_of, random_data, tanh_mlp
from tacit import reference


def network_with_objective(seed=0, sizes=(5, 8, 6, 1)):
    model, data = tanh_mlp(seed, sizes), random_data(seed)
    return model, data, tacit.Objective(model, F.mse_loss, data)


def make_candidates():
    return [tacit.l2(), tacit.smooth_l1(0.05), tacit.l2(scope="*.bias", name="biases")]


def dense_rows(model, data, regularizers):
    """[design | target] of the endpoint equations as one dense matrix."""
    params = params_of(model)
    target = reference.endpoint_target(loss_of(model, F.mse_loss, data), params)
    return torch.cat([reference.design(regularizers, params), target[:, None]], dim=1)
