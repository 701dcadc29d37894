"""The published protocol compared with `estimate`: its time, and the strengths it reaches.

The protocol fits log λ by Adam (lr 0.05, every λ starting at 1) to minimise the mean over
parameters of (Σ λ_k ∇R_k + ∇L)². It takes one step per minibatch for 2000 epochs, and recomputes ∇L
for each. Here ∇R_k is computed only once, which favours the protocol: the weights do not change.

As ∇L does not depend on λ, the strengths that it reaches can be computed without 2000 epochs of
gradients: inner products of cached gradients give the same steps.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from statistics import median

import torch
from table import Row
from torch import Tensor, nn
from torch.nn import functional as F
from workload import EXAMPLES, classification_data, elastic_net, mlp, seconds

import tacit

EPOCHS, TIMED_EPOCHS = 2000, 20
RATE, BATCH = 0.05, 2048
APPLIED_STRENGTHS = {"l2": 2e-3, "smooth_l1": 1e-4}
"""Strengths of the penalties in the training loss."""


def measure(*, quick: bool) -> list[Row]:
    """Extrapolated time of the protocol relative to `estimate`, and the strengths of both."""
    count, timed_epochs = (EXAMPLES // 10, 2) if quick else (EXAMPLES, TIMED_EPOCHS)
    data = classification_data(count, separation=6.0)
    model = train_network(data, epochs=2 if quick else 8)
    exact = _estimate(model, data)
    epochs = protocol(model, data)
    epoch_times: list[float] = []
    estimate_times: list[float] = []
    strengths = torch.ones(len(exact.strengths))
    for epoch in range(timed_epochs):
        epoch_times.append(seconds(lambda: strengths.copy_(next(epochs))))
        if epoch % 4 == 0:  # between epochs, so that both see the same load
            estimate_times.append(seconds(lambda: _estimate(model, data)))
    total_time, estimate_time = EPOCHS * median(epoch_times), median(estimate_times)
    return [
        Row("published protocol / estimate", f"{total_time / estimate_time:,.0f}×"),
        Row(
            f"  one epoch of the protocol, median of {timed_epochs}",
            f"{median(epoch_times):.3f} s, so {total_time / 60:.1f} min for {EPOCHS} epochs",
        ),
        Row(f"  estimate, median of {len(estimate_times)}", f"{estimate_time:.3f} s"),
        *_accuracy(
            model, data, exact, strengths, timed_epochs=timed_epochs, epochs=40 if quick else EPOCHS
        ),
        Row("  explained by the exact strengths", f"{exact.explained:.4f}"),
    ]


def train_network(data: tuple[Tensor, Tensor], *, epochs: int) -> nn.Module:
    """A network trained for a few epochs with a known elastic net."""
    model, regularizers = mlp(), elastic_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for x, y in zip(*(part.split(512) for part in data), strict=True):
            params: dict[str, Tensor] = dict(model.named_parameters())
            penalty = sum(APPLIED_STRENGTHS[r.name] * r.value(params).sum() for r in regularizers)
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + penalty).backward()
            optimizer.step()
        schedule.step()
    return model


def protocol(model: nn.Module, data: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    """The protocol as published: yields the strengths after every epoch."""
    design = _design(model).float()
    logs = torch.zeros(len(design), requires_grad=True)
    optimizer = torch.optim.Adam([logs], lr=RATE)
    while True:
        for gradient in _gradients(model, data):
            optimizer.zero_grad()
            (logs.exp() @ design + gradient).square().mean().backward()
            optimizer.step()
        yield logs.detach().exp()


def protocol_from_products(gram: Tensor, products: Sequence[Tensor], *, steps: int) -> Tensor:
    """The strengths after the same steps, from inner products of gradients only.

    With ∇R_k as columns of Φ, the protocol minimises ‖Φλ + ∇L‖²/p, whose gradient with respect to
    log λ is 2 λ ∘ (ΦᵀΦ λ + Φᵀ∇L) / p.

    Args:
        gram: ΦᵀΦ / p.
        products: Φᵀ∇L / p of every minibatch, used in cyclic order.
        steps: the number of steps.
    """
    logs = torch.zeros(len(gram), dtype=torch.float64)
    optimizer = torch.optim.Adam([logs], lr=RATE)
    for product in islice(cycle(products), steps):
        strengths = logs.exp()
        logs.grad = 2 * strengths * (gram @ strengths + product)
        optimizer.step()
    return logs.exp()


def _accuracy(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    exact: tacit.Fit,
    strengths: Tensor,
    *,
    timed_epochs: int,
    epochs: int,
) -> Iterator[Row]:
    """Relative errors of the protocol: as published, and with steps on the full gradient.

    Args:
        model: the trained network.
        data: what it was trained on.
        exact: the fit of `estimate`.
        strengths: those that the protocol reached in the timed epochs.
        timed_epochs: how many epochs were timed.
        epochs: for how many epochs the protocol is followed.
    """
    design, count = _design(model), len(exact.strengths)
    factor = exact.equations.factor()
    products = factor.T @ factor / exact.rows  # of [∇R_1 … ∇R_k | −∇L]
    gram, full = products[:count, :count], [-products[:count, count]]
    minibatches = [design @ g.double() / exact.rows for g in _gradients(model, data)]
    steps = epochs * len(minibatches)
    cached = protocol_from_products(gram, minibatches, steps=timed_epochs * len(minibatches))
    _check_same_steps(cached, strengths)
    variants = {
        f"{epochs} epochs, one step per minibatch": (minibatches, steps),
        "as many steps on the full gradient": (full, steps),
        f"{epochs} steps on the full gradient": (full, epochs),
    }
    for description, (parts, variant_steps) in variants.items():
        reached = protocol_from_products(gram, parts, steps=variant_steps).tolist()
        for (name, exact_value), value in zip(exact.strengths.items(), reached, strict=True):
            error = abs(value - exact_value) / abs(exact_value)
            text = f"{value:.4g}, exact {exact_value:.4g}: relative error {error:.2g}"
            yield Row(f"  its {name} after {description}", text)


def _check_same_steps(cached: Tensor, recomputed: Tensor) -> None:
    """Check that cached gradients reproduce the steps of the protocol."""
    if not torch.allclose(cached, recomputed.double(), rtol=1e-3):
        raise RuntimeError(
            f"cached gradients lead to {cached.tolist()}, recomputed gradients to "
            f"{recomputed.tolist()}."
        )


def _estimate(model: nn.Module, data: tuple[Tensor, Tensor]) -> tacit.Fit:
    return tacit.estimate(model, F.cross_entropy, data, elastic_net())


def _design(model: nn.Module) -> Tensor:
    """The matrix of rows ∇R_k over all parameters, in float64."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    columns = [g for r in elastic_net() for g in r.gradient(params).values()]
    return torch.stack([torch.cat([g.flatten() for g in column.values()]) for column in columns])


def _gradients(model: nn.Module, data: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    """∇L of every minibatch, as one vector each."""
    for x, y in zip(*(part.split(BATCH) for part in data), strict=True):
        parts = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        yield torch.cat([part.flatten() for part in parts])
