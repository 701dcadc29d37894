"""A training loop on minibatches that can be watched."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tacit
from support.models import random_data, tanh_mlp

DATA = random_data(0, count=96)
SGD = {"lr": 0.05, "weight_decay": 0.1}


@dataclass
class Loop:
    """A training loop on minibatches of 8, which can be watched."""

    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: dict[str, Any] = field(default_factory=lambda: SGD)
    make_model: Callable[[int], nn.Module] = tanh_mlp
    data: tuple[torch.Tensor, ...] = DATA
    seed: int = 0

    def __post_init__(self):
        self.orders = torch.Generator().manual_seed(self.seed)
        self.model = self.make_model(0)
        self.optimizer = self.make_optimizer(self.model.parameters(), **self.options)

    def objective(self, **options):
        return tacit.Objective(self.model, F.mse_loss, self.data, **options)

    def watch(self, regularizers, *, objective=None, **options):
        objective = self.objective() if objective is None else objective
        return tacit.watch(self.model, self.optimizer, objective, regularizers, **options)

    def train(self, epochs, end_epoch=lambda: None):
        self.model.train()
        inputs, targets = self.data
        for _ in range(epochs):
            for rows in torch.randperm(len(inputs), generator=self.orders).split(8):
                self.optimizer.zero_grad()
                F.mse_loss(self.model(inputs[rows]), targets[rows]).backward()
                self.optimizer.step()
            end_epoch()

    def state(self):
        """Everything that training changes, bit by bit."""
        tensors = [*self.model.state_dict().values(), *(p.grad for p in self.model.parameters())]
        for state in self.optimizer.state.values():
            tensors += [torch.as_tensor(value) for value in state.values()]
        tensors += [self.orders.get_state(), torch.get_rng_state()]
        return [t.detach().clone().numpy().tobytes() for t in tensors]
