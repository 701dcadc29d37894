"""Time to train many small networks as one ensemble, relative to a loop over modules."""

from statistics import median

import torch
from table import Row
from torch import Tensor, nn
from torch.nn import functional as F
from workload import seconds

import tacit
from tacit import ensembles

MEMBERS, EXAMPLES, BATCH, RATE, BETA = 360, 4000, 32, 1e-3, 1e-3
MIN_SPEEDUP = 15.0
"""How many times faster than the loop the ensemble must be, per model."""


def network() -> nn.Module:
    """The network of the elastic-net figure."""
    return nn.Sequential(nn.Linear(10, 200), nn.ReLU(), nn.Linear(200, 1))


def linear_data(sets: int, examples: int) -> tuple[Tensor, Tensor]:
    """Data sets from linear models with noise."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(sets, examples, 10, generator=generator)
    coefficients = 5 * torch.randn(sets, 10, 1, generator=generator)
    return X, X @ coefficients + 0.5 * torch.randn(sets, examples, 1, generator=generator)


def plain_epoch(model: nn.Module, X: Tensor, y: Tensor, lasso: float, ridge: float) -> None:
    """One epoch of SGD on one module, as usually written."""
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
    """Time of one epoch per model, in the loop and in the ensemble, alternating.

    Denormal numbers are flushed in both.
    """
    members, examples = (36, 320) if quick else (MEMBERS, EXAMPLES)
    repeats, loop_models = (1, 1) if quick else (5, 3)
    X, y = linear_data(10, examples)
    ensemble = ensembles.initialise(network, range(members))
    data = ensembles.Data(X, y, [m % 10 for m in range(members)])
    plan = ensembles.Plan(ensembles.SGD(RATE), 1, BATCH)
    penalties = {tacit.smooth_l1(BETA): 0.1, tacit.l2(): 0.1}

    def train_ensemble() -> None:
        ensembles.train(ensemble, F.mse_loss, data, plan, seeds=range(members), penalties=penalties)

    def train_loop() -> None:
        with ensembles.flushed_denormals():
            for m in range(loop_models):
                plain_epoch(ensemble.module(m), X[m], y[m], 0.1, 0.1)

    train_ensemble()  # warm-up of both
    train_loop()
    times = [
        (seconds(train_loop) / loop_models, seconds(train_ensemble) / members)
        for _ in range(repeats)
    ]
    loop_time = median(loop for loop, _ in times)
    ensemble_time = median(ensemble for _, ensemble in times)
    speedup = loop_time / ensemble_time
    speedups = [loop / ensemble for loop, ensemble in times]
    return [
        Row(
            f"one epoch per model, ensemble of {members} / plain loop over modules",
            f"1/{speedup:.1f} (single repeats 1/{min(speedups):.1f} to 1/{max(speedups):.1f})",
            value=1 / speedup,
            bound=1 / MIN_SPEEDUP,
        ),
        Row("  plain loop, per model", f"{loop_time * 1e3:.1f} ms (median of {repeats})"),
        Row("  ensemble, per model", f"{ensemble_time * 1e3:.2f} ms (median of {repeats})"),
    ]
