"""Step sizes that change within an epoch: their part of an epoch's target, and its name."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tacit

BATCHES = 16


def averaged_epoch(seed, *, falling):
    """The fit of one epoch, in which the step size falls to zero or stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    X, noise = torch.randn(2, 128, 6, generator=generator, dtype=torch.float64)
    y = X.sum(1, keepdim=True) + noise[:, :1]
    model = nn.Linear(6, 1, bias=False).double()
    normal = X.T @ X / 128 + 0.02 * torch.eye(6).double()
    model.weight.data = torch.linalg.solve(normal, X.T @ y / 128).T
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.04)
    averages = tacit.average_epochs(model, optimizer)
    for number, rows in enumerate(torch.randperm(128, generator=generator).split(8)):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - number / BATCHES if falling else 1)
        optimizer.zero_grad()
        F.mse_loss(model(X[rows]), y[rows]).backward()
        optimizer.step()
    averages.end_epoch()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    return tacit.fit(averages.equations(objective, tacit.l2()))


def unexplained(fit):
    """The squared residual."""
    return (fit.residual_ratio * float(fit.equations.factor()[:, -1].norm())) ** 2


def names_schedule(fit):
    return any("step size changed within epochs" in problem.message for problem in fit.problems)


def test_a_schedule_within_epochs_is_named_as_the_cause_of_what_it_leaves_unexplained():
    fits = [averaged_epoch(seed, falling=True) for seed in range(12)]
    residual = sum(map(unexplained, fits)) / len(fits)
    expected = sum(fit.sources[0].schedule ** 2 for fit in fits) / len(fits)
    assert residual == pytest.approx(5 / 6 * expected, rel=0.4)  # one of six directions is fitted
    doubtful = [fit for fit in fits if fit.explained < 0.5]
    assert len(doubtful) > 6
    assert sum(map(names_schedule, doubtful)) > 0.8 * len(doubtful)


def test_constant_step_sizes_leave_little_and_no_schedule_is_named():
    for seed in range(5):
        fit = averaged_epoch(seed, falling=False)
        assert fit.sources[0].schedule < 1e-12
        assert unexplained(fit) < 1e-3
        assert not names_schedule(fit)
