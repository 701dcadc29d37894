"""The published protocol against `estimate`: how much longer it takes, and where it ends.

The protocol fits log λ by Adam (lr 0.05, every λ from 1) to minimise the mean over parameters of
(Σ λ_k ∇R_k + ∇L)², with ∇L recomputed on every minibatch of every one of 2000 epochs, and a step on
each. Here ∇R_k is computed once, which favours it: the weights do not move.

As ∇L does not depend on λ, its answer needs no 2000 epochs: inner products of cached gradients give
the same steps.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from statistics import median

import torch
from table import Row
from torch import Tensor, nn
from torch.nn import functional as F
from workload import EXAMPLES, classes, elastic_net, mlp, seconds

import tacit

EPOCHS, TIMED = 2000, 20
RATE, BATCH = 0.05, 2048
APPLIED = {"l2": 2e-3, "smooth_l1": 1e-4}
"""Strengths that the network is trained with."""


def measure(*, quick: bool) -> list[Row]:
    """Time of the protocol, extrapolated, over that of `estimate`; and both answers."""
    count, timed = (EXAMPLES // 10, 2) if quick else (EXAMPLES, TIMED)
    data = classes(count, separation=6.0)
    model = trained(data, epochs=2 if quick else 8)
    exact = _estimate(model, data)
    epochs = protocol(model, data)
    epoch: list[float] = []
    once: list[float] = []
    reached = torch.ones(len(exact.strengths))
    for turn in range(timed):
        epoch.append(seconds(lambda: reached.copy_(next(epochs))))
        if turn % 4 == 0:  # among the epochs, so that both see the same load
            once.append(seconds(lambda: _estimate(model, data)))
    total = EPOCHS * median(epoch)
    return [
        Row("published protocol / estimate", f"{total / median(once):,.0f}×"),
        Row(
            f"  one epoch of it, median of {timed}",
            f"{median(epoch):.3f} s, so {total / 60:.1f} min for {EPOCHS}",
        ),
        Row(f"  estimate, median of {len(once)}", f"{median(once):.3f} s"),
        *_answers(model, data, exact, reached, timed=timed, epochs=40 if quick else EPOCHS),
        Row("  explained by the exact strengths", f"{exact.explained:.4f}"),
    ]


def trained(data: tuple[Tensor, Tensor], *, epochs: int) -> nn.Module:
    """A network trained briefly under a known elastic net, so that there is an answer to find."""
    model, regularizers = mlp(), elastic_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for x, y in zip(*(part.split(512) for part in data), strict=True):
            params: dict[str, Tensor] = dict(model.named_parameters())
            penalty = sum(APPLIED[r.name] * r.value(params).sum() for r in regularizers)
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + penalty).backward()
            optimizer.step()
        schedule.step()
    return model


def protocol(model: nn.Module, data: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    """The protocol as published: strengths after every epoch of recomputed gradients."""
    design = _design(model).float()
    logs = torch.zeros(len(design), requires_grad=True)
    optimizer = torch.optim.Adam([logs], lr=RATE)
    while True:
        for gradient in _gradients(model, data):
            optimizer.zero_grad()
            (logs.exp() @ design + gradient).square().mean().backward()
            optimizer.step()
        yield logs.detach().exp()


def adam(gram: Tensor, moments: Sequence[Tensor], *, steps: int) -> Tensor:
    """The same steps from inner products alone.

    With ∇R_k as columns of Φ, the slope of the protocol's objective in log λ is
    2 λ (ΦᵀΦ λ + Φᵀ∇L) / p.

    Args:
        gram: ΦᵀΦ / p.
        moments: Φᵀ∇L / p of every minibatch, taken in turns.
        steps: how many steps to take.
    """
    logs = torch.zeros(len(gram), dtype=torch.float64)
    optimizer = torch.optim.Adam([logs], lr=RATE)
    for moment in islice(cycle(moments), steps):
        strengths = logs.exp()
        logs.grad = 2 * strengths * (gram @ strengths + moment)
        optimizer.step()
    return logs.exp()


def _answers(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    exact: tacit.Fit,
    reached: Tensor,
    *,
    timed: int,
    epochs: int,
) -> Iterator[Row]:
    """Where the protocol ends: as it is, without its noise, and with a step an epoch."""
    design, count = _design(model), len(exact.strengths)
    factor = exact.equations.factor()
    inner = factor.T @ factor / exact.rows  # the target among them is −∇L
    gram, whole = inner[:count, :count], [-inner[:count, count]]
    parts = [design @ g.double() / exact.rows for g in _gradients(model, data)]
    _check_same_steps(adam(gram, parts, steps=timed * len(parts)), reached)
    ends = {
        f"{epochs} epochs, a step a minibatch": adam(gram, parts, steps=epochs * len(parts)),
        "as many steps on the full gradient": adam(gram, whole, steps=epochs * len(parts)),
        f"{epochs} steps on the full gradient": adam(gram, whole, steps=epochs),
    }
    for how, end in ends.items():
        for (name, value), found in zip(exact.strengths.items(), end.tolist(), strict=True):
            off = abs(found - value) / abs(value)
            text = f"{found:.4g}, exact {value:.4g}: {off:.2g} off, relative"
            yield Row(f"  its {name} after {how}", text)


def _check_same_steps(cached: Tensor, recomputed: Tensor) -> None:
    """Refuse to speak for the protocol where cached gradients lead elsewhere."""
    if not torch.allclose(cached, recomputed.double(), rtol=1e-3):
        raise RuntimeError(
            f"cached gradients lead to {cached.tolist()}, recomputed ones to {recomputed.tolist()}."
        )


def _estimate(model: nn.Module, data: tuple[Tensor, Tensor]) -> tacit.Fit:
    return tacit.estimate(model, F.cross_entropy, data, elastic_net())


def _design(model: nn.Module) -> Tensor:
    """∇R_k over all parameters, a row each, in float64."""
    params: dict[str, Tensor] = dict(model.named_parameters())
    columns = [g for r in elastic_net() for g in r.gradient(params).values()]
    return torch.stack([torch.cat([g.flatten() for g in column.values()]) for column in columns])


def _gradients(model: nn.Module, data: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    """∇L of every minibatch, flat."""
    for x, y in zip(*(part.split(BATCH) for part in data), strict=True):
        parts = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        yield torch.cat([part.flatten() for part in parts])
