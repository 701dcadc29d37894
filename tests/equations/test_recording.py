"""Recorded training loops give the same trajectory as their positions."""

import pytest
import torch
from support.descent import descend
from support.models import random_data, tanh_mlp
from torch.nn import functional as F

import tacit


def test_a_recorded_loop_has_the_trajectory_of_its_positions():
    model, data, step = tanh_mlp(6), random_data(6), 1e-2
    positions = descend(tanh_mlp(6), data, step, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    by_hand, by_optimizer = tacit.record(model), tacit.record(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(data[0]), data[1]).backward()
        optimizer.step()
        by_hand.step(step)
        by_optimizer.step()
    expected = tacit.Trajectory.from_positions(positions, step)
    for recorded in (by_hand.trajectory(), by_optimizer.trajectory()):
        assert list(recorded.times) == list(expected.times)
        for name in positions[0]:
            for kind in ("points", "displacements"):
                for a, b in zip(getattr(recorded, kind), getattr(expected, kind), strict=True):
                    assert torch.equal(a[name], b[name])


def test_momentum_multiplies_the_recorded_time():
    model = tanh_mlp(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    recorder = tacit.record(model, optimizer)
    X, y = random_data(7)
    for updates in (1, 2):
        for _ in range(updates):
            optimizer.zero_grad()
            F.mse_loss(model(X), y).backward()
            optimizer.step()
            scheduler.step()  # the time is read at the update, not here
        recorder.step()
    assert recorder.trajectory().times == pytest.approx([1.0, 0.5 + 0.25])


def test_dampening_counts_only_with_momentum():
    model = tanh_mlp(7)
    X, y = random_data(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, dampening=0.5)
    recorder = tacit.record(model, optimizer)
    F.mse_loss(model(X), y).backward()
    optimizer.step()
    recorder.step()
    assert recorder.trajectory().times == pytest.approx([0.1])
