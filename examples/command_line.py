"""What the command `tacit` is called on: functions that return an objective, or two of them."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import tacit


def train(decay: float, seed: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A small network at the optimum of mean squared error + decay/2·‖θ‖², and its data."""
    torch.set_num_threads(1)  # such small matrices are slower with several threads
    torch.manual_seed(seed)
    inputs = torch.randn(300, 5, dtype=torch.float64)
    targets = inputs[:, :3].sin().sum(1, keepdim=True) + 0.1 * torch.randn(300, 1).double()
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    options = {"max_iter": 2000, "history_size": 100, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(
        model.parameters(), tolerance_grad=1e-9, tolerance_change=0, **options
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        norm = sum(p.square().sum() for p in model.parameters())
        total = F.mse_loss(model(inputs), targets) + decay / 2 * norm
        total.backward()
        return total

    optimizer.step(closure)
    return model, (inputs, targets)


def trained(decay: float = 0.002, seed: int = 0, checkpoint: Path | None = None) -> tacit.Objective:
    """The network, trained here or with the weights of a checkpoint."""
    model, data = train(decay, seed)
    if checkpoint is not None:
        model.load_state_dict(torch.load(checkpoint))
    return tacit.Objective(model, F.mse_loss, data)


def noisy_inputs(size: float = 0.05) -> tuple[tacit.Objective, tacit.Objective]:
    """The same network with noise on its inputs, and without: what does the noise add?"""
    plain = trained()
    return tacit.techniques.input_noise(plain, size, draws=32), plain
