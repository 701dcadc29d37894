"""Full-batch gradient descent, whose positions are a trajectory."""

import torch
from torch.nn import functional as F

from support.models import params_of


def descend(model, data, step, count, *, ridge=0.0, momentum=0.0, burn_in=0):
    """Positions of full-batch (heavy-ball) descent on mean squared error + ridge·‖θ‖²."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=step, momentum=momentum, weight_decay=2 * ridge
    )
    positions = []
    for iteration in range(burn_in + count + 1):
        if iteration >= burn_in:
            positions.append(params_of(model))
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
    return positions
