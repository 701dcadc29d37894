"""Small data sets and networks, and the ways in which they are trained."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tacit import Objective, Regularizer, Target, average_epochs
from tacit.equations.epochs import EpochAverages
from tacit.regularizers import metric_ridge
from tacit_paper import minimising

Examples = tuple[Tensor, Tensor]
Penalty = Callable[[Mapping[str, Tensor]], Tensor]
"""A penalty as a user writes it in a training loop: a function of the named parameters."""
BETA = 0.1
"""Smoothing width of smooth L1."""


def draw_data(seed: int, examples: int = 128, noise: float = 0.3) -> Examples:
    """Inputs, and targets y = sin(Σ xᵢ) + x₁x₂ + noise."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(examples, 4, generator=generator).double()
    y = X.sum(1, keepdim=True).sin() + X[:, :1] * X[:, 1:2]
    return X, y + noise * torch.randn(examples, 1, generator=generator).double()


def build(seed: int, make_model: Callable[[], nn.Module]) -> nn.Module:
    """A model in float64 whose initial weights depend only on the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make_model().double()


def tanh_network(seed: int, width: int = 8, after: Sequence[nn.Module] = ()) -> nn.Module:
    """One hidden layer of tanh units, with other layers behind it."""
    return build(
        seed,
        lambda: nn.Sequential(nn.Linear(4, width), nn.Tanh(), *after, nn.Linear(width, 1)),
    )


def l2_value(params: Mapping[str, Tensor]) -> Tensor:
    """‖θ‖² over all parameters."""
    return torch.cat([p.flatten() for p in params.values()]).square().sum()


def matrices_l2_value(params: Mapping[str, Tensor]) -> Tensor:
    """‖θ‖² over the weights, without biases."""
    return l2_value({name: p for name, p in params.items() if p.ndim > 1})


def smooth_l1_value(params: Mapping[str, Tensor]) -> Tensor:
    """Smooth L1 over all parameters."""
    weights = torch.cat([p.flatten() for p in params.values()])
    return F.smooth_l1_loss(weights, torch.zeros_like(weights), reduction="sum", beta=BETA)


def minimise(model: nn.Module, loss: Callable[[], Tensor], penalties: dict[Penalty, float]) -> None:
    """Train on the full batch until the gradient of L + R vanishes, by L-BFGS."""
    params = dict(model.named_parameters())

    def penalised() -> Tensor:
        return loss() + sum(s * penalty(params) for penalty, s in penalties.items())

    minimising.minimise(penalised, params.values(), iterations=600, history=40, tolerance=1e-6)


def train_to_optimum(
    seed: int, penalties: dict[Penalty, float], model: nn.Module | None = None
) -> Objective:
    """A network trained to the optimum of the mean squared error plus penalties."""
    data = draw_data(seed)
    trained = tanh_network(seed) if model is None else model
    minimise(trained, lambda: F.mse_loss(trained(data[0]), data[1]), penalties)
    return Objective(trained, F.mse_loss, data)


def train_epochs(  # noqa: PLR0913 # what is trained and how, then keyword options
    model: nn.Module,
    optimizer: Optimizer,
    data: Examples,
    *,
    seed: int,
    epochs: int = 60,
    batch: int = 16,
    recorded: int = 10,
    cosine: bool = False,
    penalties: dict[Penalty, float] | None = None,
) -> EpochAverages:
    """Train in minibatches, shuffled anew in every epoch; averages of the last epochs."""
    generator = torch.Generator().manual_seed(seed)
    params, batches = dict(model.named_parameters()), len(data[1]) // batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    averages = average_epochs(model, optimizer, epochs=recorded)
    for _ in range(epochs):
        for rows in torch.randperm(len(data[1]), generator=generator).split(batch):
            optimizer.zero_grad()
            loss = F.mse_loss(model(data[0][rows]), data[1][rows])
            for penalty, strength in (penalties or {}).items():
                loss = loss + strength * penalty(params)
            loss.backward()
            optimizer.step()
            if cosine:
                schedule.step()
        averages.end_epoch()
    averages.close()
    return averages


def train_steps(
    model: nn.Module,
    optimizer: Optimizer,
    data: Examples,
    batches: Iterable[Tensor],
    *,
    after_step: Callable[[], None] = lambda: None,
    max_norm: float = math.inf,
) -> None:
    """Train on these batches, each a tensor of rows, with gradients clipped to a norm."""
    for rows in batches:
        optimizer.zero_grad()
        F.mse_loss(model(data[0][rows]), data[1][rows]).backward()
        if max_norm < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        after_step()
    optimizer.zero_grad()


def random_batches(seed: int, steps: int, *, size: int = 64, examples: int = 128) -> list[Tensor]:
    """Rows of random batches, drawn with replacement."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(examples, (steps, size), generator=generator))


def adamw_target(seed: int) -> tuple[Target, Regularizer]:
    """Ten epochs of AdamW in minibatches, with a cosine schedule; and the penalty of its decay."""
    data, model = draw_data(seed, examples=256), tanh_network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3)
    averages = train_epochs(model, optimizer, data, seed=seed, epochs=40, cosine=True)
    return averages.target(Objective(model, F.mse_loss, data)), metric_ridge(optimizer, model)
