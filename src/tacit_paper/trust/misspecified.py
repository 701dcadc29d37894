"""Problems whose fit is wrong unless its Problem is read; each has the kind that must be reported.

Each function makes the fit of one seed, which draws new data, initial weights and batches.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import Fit, Objective, fit, record
from tacit.equations import difference_equations, endpoint_equations, trajectory_equations
from tacit.regularizers import l1, l2
from tacit_paper.trust.training import (
    adamw_target,
    build,
    draw_data,
    l2_value,
    matrices_l2_value,
    minimise,
    random_batches,
    smooth_l1_value,
    tanh_network,
    train_epochs,
    train_steps,
    train_to_optimum,
)

PADDING = -100


def missing_l1(seed: int) -> Fit:
    """A difference of 0.01‖θ‖² + 0.02‖θ‖₁, without noise, asked for ridge alone."""
    data, model = draw_data(seed), tanh_network(seed)

    def penalised(model: nn.Module, batch: Any) -> Tensor:
        params = dict(model.named_parameters())
        lasso = torch.cat([p.flatten() for p in params.values()]).abs().sum()
        errors = (model(batch[0]) - batch[1]).square()[:, 0]
        return errors + 0.01 * l2_value(params) + 0.02 * lasso

    technique = Objective.from_batch_loss(model, penalised, data)
    return fit(difference_equations(technique, Objective(model, F.mse_loss, data), l2()))


def biases_too(seed: int) -> Fit:
    """Ridge of the weights without the biases, asked for ridge of all parameters."""
    return fit(endpoint_equations(train_to_optimum(seed, {matrices_l2_value: 0.01}), l2()))


def smooth_l1_as_ridge(seed: int) -> Fit:
    """Smooth L1, asked for ridge."""
    return fit(endpoint_equations(train_to_optimum(seed, {smooth_l1_value: 0.01}), l2()))


def nearly_zero(seed: int) -> Fit:
    """L1 by subgradient steps, which leave weights near zero where the optimum has zeros."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(200, 20, generator=generator).double()
    coefficients = torch.randn(20, 1, generator=generator).double()
    coefficients[10:] = 0
    y = X @ coefficients + 0.3 * torch.randn(200, 1, generator=generator).double()
    model = build(seed, lambda: nn.Linear(20, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for _ in range(400):
        optimizer.zero_grad()
        (F.mse_loss(model(X), y) + 0.2 * l1_value(model)).backward()
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    return fit(endpoint_equations(Objective(model, F.mse_loss, (X, y)), l1()))


def l1_value(model: nn.Module) -> Tensor:
    """‖θ‖₁ over all parameters."""
    return torch.cat([p.flatten() for p in model.parameters()]).abs().sum()


def adamw_as_ridge(seed: int) -> Fit:
    """The decay of AdamW, asked for ridge."""
    target, _ = adamw_target(seed)
    return fit(target.equations(l2()))


def missing_smooth_l1(seed: int) -> Fit:
    """Ten epochs of SGD in minibatches, with ridge and smooth L1, asked for ridge alone."""
    data, model = draw_data(seed), tanh_network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=0.02)
    averages = train_epochs(model, optimizer, data, seed=seed, penalties={smooth_l1_value: 0.02})
    return fit(averages.equations(Objective(model, F.mse_loss, data), l2()))


def padding(seed: int) -> Fit:
    """Tokens, of which 3 in 10 are padding in every fifth sequence, and were counted as data."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(7, (40, 10), generator=generator)
    labels = (tokens + tokens.roll(1, 1)) % 7
    labels[::5, 7:] = PADDING
    model = build(seed, lambda: nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7)))

    def token_losses(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0]).movedim(-1, 1)
        return F.cross_entropy(scores, batch[1], reduction="none", ignore_index=PADDING).flatten()

    def mean_loss() -> Tensor:
        return token_losses(model, (tokens, labels)).sum() / (labels != PADDING).sum()

    minimise(model, mean_loss, {l2_value: 0.01})
    return fit(
        endpoint_equations(Objective.from_batch_loss(model, token_losses, (tokens, labels)), l2())
    )


def decay_by_layer(seed: int) -> Fit:
    """Ten epochs of SGD in minibatches, with another decay for each layer, asked for one."""
    data, model = draw_data(seed), tanh_network(seed)
    decays = {"0": 0.02, "2": 0.06}
    groups = [
        {"params": list(model.get_submodule(layer).parameters()), "weight_decay": decay}
        for layer, decay in decays.items()
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    averages = train_epochs(model, optimizer, data, seed=seed)
    return fit(averages.equations(Objective(model, F.mse_loss, data), l2()))


def young_adam(seed: int) -> Fit:
    """The first two epochs of Adam, whose mean of squared gradients still changes."""
    data, model = draw_data(seed), tanh_network(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.02)
    averages = train_epochs(model, optimizer, data, seed=seed, epochs=2)
    return fit(averages.equations(Objective(model, F.mse_loss, data), l2()))


def clipping(seed: int) -> Fit:
    """60 later steps of SGD with weight decay 0.4, with gradients clipped to a norm of 0.1."""
    data, model = draw_data(seed), tanh_network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.4)
    batches = random_batches(seed, 120)
    train_steps(model, optimizer, data, batches[:60], max_norm=0.1)
    recorder = record(model, optimizer)
    train_steps(model, optimizer, data, batches[60:], after_step=recorder.step, max_norm=0.1)
    objective = Objective(model, F.mse_loss, data)
    return fit(trajectory_equations(objective, recorder.trajectory(), l2()))
