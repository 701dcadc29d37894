"""Laws of training whose penalty is read from data, each recovered with its coefficient."""

from itertools import permutations

import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp

import tacit
from tacit import Objective
from tacit.regularizers import (
    gradient_norm,
    gradient_variance,
)


def half_squares(output, target):
    """½(f − y)², a mean over examples."""
    return (output - target).square().sum(1).mean() / 2


def mean_epoch(model, theta, epochs, step):
    """The mean displacement of epochs of SGD, each a list of batches."""
    total = {n: torch.zeros_like(p) for n, p in theta.items()}
    for batches in epochs:
        moved = theta
        for batch in batches:
            gradient = torch.func.grad(loss_of(model, half_squares, batch))(moved)
            moved = {n: p - step * gradient[n] for n, p in moved.items()}
        total = {n: t + (moved[n] - theta[n]) / len(epochs) for n, t in total.items()}
    return total


def test_epochs_that_shuffle_examples_add_the_variance_over_examples_at_a_part_of_it():
    """Batches of B out of n examples, grouped anew: (η/4)(n−B)/(B(n−1)) of that over examples."""
    model, (X, y), step = tanh_mlp(7), random_data(7, count=4), 1e-3
    orders = [torch.tensor(order).split(2) for order in permutations(range(4))]
    points = [params_of(tanh_mlp(seed)) for seed in range(3)]
    shuffled = [[(X[part], y[part]) for part in parts] for parts in orders]
    moved = [mean_epoch(model, theta, shuffled, step) for theta in points]

    objective = Objective(model, half_squares, (X, y), batch_size=1)
    pair = [gradient_norm(objective), gradient_variance(objective)]
    epochs = tacit.Trajectory(points, moved, [2 * step] * 3)
    equations = tacit.trajectory_equations(objective, epochs, pair, reference=tacit.rk4())
    strengths = tacit.fit(equations).strengths
    assert strengths["gradient_norm"] / (step / 4) == pytest.approx(1, abs=0.01)
    expected = step / 4 * (4 - 2) / (2 * (4 - 1))
    assert strengths["gradient_variance"] / expected == pytest.approx(1, abs=0.01)
