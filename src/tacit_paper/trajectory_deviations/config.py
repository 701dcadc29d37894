"""Settings of the trajectory figure, and its network."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Config:
    """A network with two weights on 96 points, trained by gradient flow and by minibatch SGD."""

    points: int = 96
    flow_step: float = 4e-3
    flow_steps: int = 3000
    step: float = 0.4
    batch: int = 8
    steps: int = 6
    start: tuple[float, float] = (-0.35, 0.9)
    grid: int = 60
    draws: int = 2000
    """How often the batches of the shown steps are drawn again."""
    epoch_step: float = 3e-4
    """η of the shuffled epochs."""
    orders: int = 1000
    """Orders of the batches of an epoch; each is also run in reverse."""
    substeps: int = 10
    """Runge–Kutta steps of the flow in the time of an epoch."""
    seed: int = 0


PAPER = Config()
QUICK = Config(flow_steps=1500, grid=40, orders=300)


class Network(nn.Module):
    """tanh(wx + b)."""

    def __init__(self, start: tuple[float, float]):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start[0], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(start[1], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """The output for every x."""
        return torch.tanh(self.w * x + self.b)
