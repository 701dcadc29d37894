"""Many small networks trained as one program, against a plain loop over modules."""

from statistics import median

import torch
from table import Row
from torch import Tensor, nn
from torch.nn import functional as F
from workload import seconds

import tacit
from tacit import ensembles

MEMBERS, EXAMPLES, BATCH, RATE, BETA = 360, 4000, 32, 1e-3, 1e-3
LEAST = 15.0
"""How many times less than the loop a model must cost."""


def network() -> nn.Module:
    """The elastic-net figure's network."""
    return nn.Sequential(nn.Linear(10, 200), nn.ReLU(), nn.Linear(200, 1))


def draw(sets: int, examples: int) -> tuple[Tensor, Tensor]:
    """Data sets of a linear law with noise."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(sets, examples, 10, generator=generator)
    coefficients = 5 * torch.randn(sets, 10, 1, generator=generator)
    return X, X @ coefficients + 0.5 * torch.randn(sets, examples, 1, generator=generator)


def plain_epoch(model: nn.Module, X: Tensor, y: Tensor, lasso: float, ridge: float) -> None:
    """One epoch of one module, as a user writes it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for index in torch.randperm(len(X)).split(BATCH):
        loss = F.mse_loss(model(X[index]), y[index])
        for theta in model.parameters():
            zero = torch.zeros_like(theta)
            smooth = F.smooth_l1_loss(theta, zero, beta=BETA, reduction="sum")
            loss = loss + lasso * smooth + ridge * theta.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def measure(*, quick: bool) -> list[Row]:
    """Time of an epoch for one model, alone and in the ensemble, taking turns; flushing in both."""
    members, examples = (36, 320) if quick else (MEMBERS, EXAMPLES)
    turns, models = (1, 1) if quick else (5, 3)
    X, y = draw(10, examples)
    ensemble = ensembles.initialise(network, range(members))
    data = ensembles.Data(X, y, [m % 10 for m in range(members)])
    plan = ensembles.Plan(ensembles.SGD(RATE), 1, BATCH)
    penalties = {tacit.smooth_l1(BETA): 0.1, tacit.l2(): 0.1}

    def together() -> None:
        ensembles.train(ensemble, F.mse_loss, data, plan, seeds=range(members), penalties=penalties)

    def alone() -> None:
        with ensembles.flushed_denormals():
            for m in range(models):
                plain_epoch(ensemble.module(m), X[m], y[m], 0.1, 0.1)

    together()
    alone()
    pairs = [(seconds(alone) / models, seconds(together) / members) for _ in range(turns)]
    one, shared = median(a for a, _ in pairs), median(b for _, b in pairs)
    ratio = one / shared
    ratios = [a / b for a, b in pairs]
    return [
        Row(
            f"an epoch of a model among {members} / in a plain loop over modules",
            f"1/{ratio:.1f} (single turns 1/{min(ratios):.1f} to 1/{max(ratios):.1f})",
            value=1 / ratio,
            bound=1 / LEAST,
        ),
        Row("  plain loop, a model", f"{one * 1e3:.1f} ms (median of {turns})"),
        Row("  ensemble, a model", f"{shared * 1e3:.2f} ms (median of {turns})"),
    ]
