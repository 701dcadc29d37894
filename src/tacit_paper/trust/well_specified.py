"""Problems whose candidates are those that were applied: a fit should have no Problem.

Each function makes the fit of one seed, which draws new data, initial weights and batches.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tacit import Fit, Objective, Trajectory, fit, matrices, record, rk4
from tacit.equations import difference_equations, endpoint_equations, trajectory_equations
from tacit.regularizers import explicit_dropout, gradient_norm, l2, smooth_l1
from tacit_paper.trust.training import (
    BETA,
    adamw_target,
    build,
    draw_data,
    l2_value,
    matrices_l2_value,
    random_batches,
    smooth_l1_value,
    tanh_network,
    train_epochs,
    train_steps,
    train_to_optimum,
)

STEP = 0.005
"""The step size η of implicit steps."""


def ridge(seed: int) -> Fit:
    """Ridge of all parameters, at an optimum."""
    return fit(endpoint_equations(train_to_optimum(seed, {l2_value: 0.01}), l2()))


def ridge_of_matrices(seed: int) -> Fit:
    """Ridge of the weights without the biases, at an optimum."""
    objective = train_to_optimum(seed, {matrices_l2_value: 0.01})
    return fit(endpoint_equations(objective, l2(scope=matrices)))


def elastic_net(seed: int) -> Fit:
    """Ridge and smooth L1, at an optimum."""
    objective = train_to_optimum(seed, {l2_value: 0.01, smooth_l1_value: 0.01})
    return fit(endpoint_equations(objective, [l2(), smooth_l1(BETA)]))


def shared_layer(seed: int) -> Fit:
    """Ridge of a network that has the same layer twice, at an optimum."""

    def make_model() -> nn.Module:
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 1))

    objective = train_to_optimum(seed, {l2_value: 0.01}, build(seed, make_model))
    return fit(endpoint_equations(objective, l2()))


def dropout(seed: int) -> Fit:
    """What dropout of the last hidden layer adds, from random draws: q/(1−q) = 1/4."""
    data, model = draw_data(seed), tanh_network(seed, after=[nn.Dropout(0.2)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train_steps(model.eval(), optimizer, data, random_batches(seed, 100))
    technique = Objective(model, F.mse_loss, data, training=True, draws=256, seed=seed)
    plain = Objective(model, F.mse_loss, data)
    return fit(difference_equations(technique, plain, explicit_dropout(plain)))


def implicit_euler(seed: int) -> Fit:
    """Implicit steps θ′ = θ − η∇L(θ′) against the gradient flow: −η/4 of ‖∇L‖²."""
    objective = Objective(tanh_network(seed), F.mse_loss, draw_data(seed))
    positions = [{n: p.clone() for n, p in objective.point().items()}]
    for _ in range(4):
        end = positions[-1]
        for _ in range(12):  # the fixed point, to rounding
            gradient = objective.gradient(end)
            end = {n: p - STEP * gradient[n] for n, p in positions[-1].items()}
        positions.append(end)
    trajectory = Trajectory.from_positions(positions, STEP)
    return fit(
        trajectory_equations(objective, trajectory, gradient_norm(objective), reference=rk4())
    )


def momentum(seed: int) -> Fit:
    """60 recorded steps of SGD with momentum 0.9 and weight decay 0.4, after 60 others."""
    data, model = draw_data(seed), tanh_network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.4)
    batches = random_batches(seed, 120, size=128)
    train_steps(model, optimizer, data, batches[:60])
    recorder = record(model, optimizer)
    train_steps(model, optimizer, data, batches[60:], after_step=recorder.step)
    objective = Objective(model, F.mse_loss, data)
    return fit(trajectory_equations(objective, recorder.trajectory(), l2()))


def epochs(seed: int) -> Fit:
    """Ten epochs of SGD in minibatches, with weight decay 0.02."""
    data, model = draw_data(seed), tanh_network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.02)
    averages = train_epochs(model, optimizer, data, seed=seed)
    return fit(averages.equations(Objective(model, F.mse_loss, data), l2()))


def adamw(seed: int) -> Fit:
    """Ten epochs of AdamW in minibatches, with a cosine schedule and weight decay 0.3."""
    target, penalty = adamw_target(seed)
    return fit(target.equations(penalty))


def batch_norm(seed: int) -> Fit:
    """Epochs of SGD with batch norm, a cosine schedule and weight decay 0.05."""

    def make_model() -> nn.Module:
        first = nn.Linear(4, 8, bias=False)
        return nn.Sequential(first, nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    data, model = draw_data(seed, examples=256), build(seed, make_model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.05)
    averages = train_epochs(model, optimizer, data, seed=seed, batch=32, recorded=4, cosine=True)
    objective = Objective(
        model, F.mse_loss, data, batch_norm="batch", batch_size=32, draws=8, seed=seed
    )
    return fit(averages.equations(objective, l2()))
