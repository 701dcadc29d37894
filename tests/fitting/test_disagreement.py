"""Error bars that the equations determine from the differences between their parts."""

import torch
from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit


def test_epochs_stacked_with_an_endpoint_keep_their_allowance():
    X, y = random_data(4, count=64)
    torch.manual_seed(0)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.2)
    averages = tacit.average_epochs(model, optimizer, epochs=6)
    for _ in range(40):
        for batch in torch.randperm(64).split(8):
            optimizer.zero_grad()
            F.mse_loss(model(X[batch]), y[batch]).backward()
            optimizer.step()
        averages.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    epochs = averages.equations(objective, tacit.l2())
    stacked = tacit.stack([epochs, tacit.endpoint_equations(objective, tacit.l2())])
    bars = tacit.fit(stacked).error_bars["training"]
    assert "allowance" in bars.basis
    assert bars.measured
