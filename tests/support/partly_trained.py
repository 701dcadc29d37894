"""Networks in the middle of training, and penalties in random directions."""

from functools import cache

import torch
from torch.nn import functional as F

import tacit
from support.models import random_data, tanh_mlp


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

    def value(params):
        generator = torch.Generator().manual_seed(seed)
        return sum(
            (p * torch.randn(p.shape, generator=generator, dtype=p.dtype)).sum()
            for p in params.values()
        )

    return tacit.regularizer(name, value, scope=scope)
