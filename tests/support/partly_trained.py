"""Networks in the middle of training, and penalties in random directions."""

from functools import cache

import torch
from torch.nn import functional as F

import tacit
from support.models import random_data, tanh_mlp
from tacit.objective.params import select
from tacit.regularizers.family import whole_column


@cache
def partly_trained(seed):
    """The objective of a network after some steps of AdamW: no penalty is recovered exactly."""
    model, data = tanh_mlp(seed, (5, 10, 6, 1)), random_data(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    for _ in range(20 * (1 + seed % 5)):
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
    return tacit.Objective(model, F.mse_loss, data)


def random_direction(name, seed, scope=None):
    """A penalty whose gradient is one random direction."""

    def direction(params):
        generator = torch.Generator().manual_seed(seed)
        entries = {n: torch.randn(p.shape, generator=generator).to(p) for n, p in params.items()}
        return {n: entries[n] for n in select(params, scope, what="scope")}

    def value(params):
        return sum((params[n] * v).sum() for n, v in direction(params).items()).reshape(1)

    return tacit.Regularizer(name, lambda params: whole_column(name, direction(params)), value)
