"""Networks whose penalties are known, and others without a penalty."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import Objective, Target, average_epochs, difference_target, endpoint_target
from tacit.objective import Noise
from tacit.techniques import label_smoothing
from tacit_paper.minimising import minimise
from tacit_paper.screening.config import Config

STRENGTH = 0.01
"""Of ridge, and of its distance to the initial weights."""
LASSO, BETA = 0.005, 0.01
"""Strength of lassos, and the width of a smooth one."""
DECAY = 0.3
"""AdamW's weight decay: strength DECAY/2 of ridge in its metric."""
SMOOTHING, RATE = 0.1, 0.025
"""Label smoothing, and the rate of dropout after every hidden layer but the first."""
Penalty = Callable[[dict[str, Tensor]], Tensor]


class Case(NamedTuple):
    """What is screened, and what is true."""

    target: Target
    truth: tuple[str, ...]
    """The candidates that were applied; empty where there is none."""
    options: dict[str, Any]
    """Of the screen: start, optimizer, cost."""
    accepted: tuple[str, ...] = ()
    """Candidates that stand for the truth as well."""


class Branches(nn.Module):
    """Eight networks of one hidden layer, added up: 16 layers."""

    def __init__(self, branches: int = 8, width: int = 5):
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(4, width) for _ in range(branches))
        self.outer = nn.ModuleList(nn.Linear(width, 1) for _ in range(branches))
        self.activation = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all branches."""
        pairs = zip(self.hidden, self.outer, strict=True)
        return torch.stack([outer(self.activation(hidden(x))) for hidden, outer in pairs]).sum(0)


def regression(seed: int, examples: int = 200) -> tuple[Branches, tuple[Tensor, Tensor]]:
    """Branches and noisy values of a smooth function."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Branches().double()
        X = torch.randn(examples, 4).double()
        noise = 0.2 * torch.randn(examples, 1).double()
    return model, (X, torch.sin(2 * X[:, :1]) + X[:, 1:2] * X[:, 2:3] + noise)


def start_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def squares(tensors: dict[str, Tensor]) -> Tensor:
    """Σθ²."""
    return torch.stack([t.square().sum() for t in tensors.values()]).sum()


def smooth_lasso(tensors: dict[str, Tensor]) -> Tensor:
    """The smooth lasso of width `BETA`."""
    parts = [
        F.smooth_l1_loss(t, torch.zeros_like(t), beta=BETA, reduction="sum")
        for t in tensors.values()
    ]
    return torch.stack(parts).sum()


def optimum(
    config: Config, seed: int, penalty: Callable[[dict[str, Tensor]], Penalty], *truth: str
) -> Case:
    """Branches at a minimum of loss plus penalty; penalty(start) is a function of the weights."""
    model, (X, y) = regression(seed)
    start = start_of(model)
    added = penalty(start)
    params: dict[str, Tensor] = dict(model.named_parameters())
    for _ in range(3):  # L-BFGS begins with a new curvature
        minimise(
            lambda: F.mse_loss(model(X), y) + added(params), params.values(),
            iterations=config.iterations, history=100,
        )  # fmt: skip
    return _endpoint(model, X, y, start, truth)


def _endpoint(
    model: nn.Module, X: Tensor, y: Tensor, start: dict[str, Tensor], truth: tuple[str, ...]
) -> Case:
    return Case(endpoint_target(Objective(model, F.mse_loss, (X, y))), truth, {"start": start})


def ridge(config: Config, seed: int) -> Case:
    """Σθ² of all parameters."""
    return optimum(config, seed, lambda _: lambda p: STRENGTH * squares(p), "l2")


def ridge_of_matrices(config: Config, seed: int) -> Case:
    """Σθ² of the weights without biases."""

    def penalty(params: dict[str, Tensor]) -> Tensor:
        return STRENGTH * squares({n: p for n, p in params.items() if p.ndim > 1})

    return optimum(config, seed, lambda _: penalty, "l2[matrices]")


def smooth(config: Config, seed: int) -> Case:
    """A smooth lasso."""
    return optimum(
        config, seed, lambda _: lambda p: LASSO * smooth_lasso(p), f"smooth_l1({BETA:g})"
    )


def both(config: Config, seed: int) -> Case:
    """Ridge and a smooth lasso."""

    def penalty(params: dict[str, Tensor]) -> Tensor:
        return STRENGTH / 2 * squares(params) + LASSO / 2 * smooth_lasso(params)

    return optimum(config, seed, lambda _: penalty, "l2", f"smooth_l1({BETA:g})")


def distance(config: Config, seed: int) -> Case:
    """The squared distance to the initial weights."""

    def penalty(start: dict[str, Tensor]) -> Penalty:
        return lambda params: STRENGTH * squares({n: p - start[n] for n, p in params.items()})

    return optimum(config, seed, penalty, "distance_to")


def proximal(
    config: Config, seed: int, shrink: Callable[[Tensor, float], Tensor], name: str
) -> Case:
    """Branches by accelerated proximal descent; shrink(tensor, threshold) is the proximal map."""
    model, (X, y) = regression(seed)
    start, tensors = start_of(model), list(model.parameters())
    previous, rate, momentum = [p.detach().clone() for p in tensors], 0.02, 0
    for _ in range(config.proximal_steps):
        model.zero_grad()
        F.mse_loss(model(X), y).backward()
        with torch.no_grad():
            now = [shrink(p - rate * _gradient(p), rate * LASSO) for p in tensors]
            steps = [new - old for new, old in zip(now, previous, strict=True)]
            back = sum(
                float(((p - new) * s).sum()) for p, new, s in zip(tensors, now, steps, strict=True)
            )
            momentum = 0 if back > 0 else momentum + 1  # a restart where it overshoots
            for p, new, step in zip(tensors, now, steps, strict=True):
                p.copy_(new + momentum / (momentum + 3) * step)
            previous = now
            if max(float(step.abs().max()) for step in steps) < 1e-12:
                break
    with torch.no_grad():
        for p, value in zip(tensors, previous, strict=True):
            p.copy_(value)
    return _endpoint(model, X, y, start, (name,))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def lasso(config: Config, seed: int) -> Case:
    """Σ|θ|, with exact zeros."""

    def shrink(tensor: Tensor, threshold: float) -> Tensor:
        return tensor.sign() * (tensor.abs() - threshold).clamp_min(0)

    return proximal(config, seed, shrink, "l1")


def nuclear(config: Config, seed: int) -> Case:
    """The nuclear norm of all matrices, with low ranks."""

    def shrink(tensor: Tensor, threshold: float) -> Tensor:
        if tensor.ndim < 2:
            return tensor
        u, s, vh = torch.linalg.svd(tensor, full_matrices=False)
        return (u * (s - threshold).clamp_min(0)) @ vh

    return proximal(config, seed, shrink, "nuclear_norm")


def adamw(config: Config, seed: int) -> Case:
    """AdamW on minibatches; ten epochs are averaged."""
    model, (X, y) = regression(seed, 1000)
    start = start_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
    averages = average_epochs(model, optimizer, epochs=10)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(80):
        for rows in torch.randperm(len(X), generator=generator).split(50):
            optimizer.zero_grad()
            F.mse_loss(model(X[rows]), y[rows]).backward()
            optimizer.step()
        if epoch < 60:
            schedule.step()
        averages.end_epoch()
    target = averages.target(Objective(model, F.mse_loss, (X, y)))
    return Case(target, ("metric_ridge",), {"start": start, "optimizer": optimizer})


def classifier(seed: int, *, dropout: float = 0.0) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """A chain of ten layers after a few steps, and classes of its inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(6, 16), nn.ReLU()]
        for _ in range(8):
            layers += [nn.Dropout(dropout), nn.Linear(16, 16), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(16, 3)).double()
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, gain=2**0.5)
        X = torch.randn(300, 6).double()
    y = (X[:, :3] + X[:, 3:].square()).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model.eval()(X), y).backward()
        optimizer.step()
    return model, (X, y)


def smoothed_labels(config: Config, seed: int) -> Case:
    """What label smoothing adds."""
    model, data = classifier(seed)
    plain = Objective(model, F.cross_entropy, data)
    target = difference_target(label_smoothing(plain, SMOOTHING), plain)
    return Case(target, ("label_smoothing",), {})


def dropout(config: Config, seed: int) -> Case:
    """What dropout adds."""
    model, data = classifier(seed, dropout=RATE)
    plain = Objective(model, F.cross_entropy, data)
    technique = Objective(model, F.cross_entropy, data, training=True, draws=256)
    target = difference_target(technique, plain)
    truth, alike = ("dropout_moments",), ("explicit_dropout",)
    return Case(target, truth, {"cost": "second-order"}, alike)


def converged(config: Config, seed: int) -> Case:
    """Branches at a minimum of the loss: more weights than examples."""
    model, (X, y) = regression(seed, 60)
    start = start_of(model)
    for _ in range(3):
        minimise(
            lambda: F.mse_loss(model(X), y), model.parameters(),
            iterations=config.iterations, history=100,
        )  # fmt: skip
    return _endpoint(model, X, y, start, ())


def no_effect(config: Config, seed: int) -> Case:
    """A technique that does nothing on average: noise times the output is added to the loss."""
    model, (X, y) = regression(seed)

    def noisy(model: nn.Module, batch: Any, noise: Noise) -> Tensor:
        output = model(batch[0])
        return ((output - batch[1]).square() + noise.normal(output).detach() * output)[:, 0]

    def plain_loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square()[:, 0]

    technique = Objective.from_batch_loss(model, noisy, (X, y), training=True, draws=32, seed=seed)
    plain = Objective.from_batch_loss(model, plain_loss, (X, y))
    return Case(difference_target(technique, plain), (), {})


def stopped_early(config: Config, seed: int) -> Case:
    """Descent on the loss that was stopped after 300 steps."""
    model, (X, y) = regression(seed)
    start, optimizer = start_of(model), torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(300):
        optimizer.zero_grad()
        F.mse_loss(model(X), y).backward()
        optimizer.step()
    return _endpoint(model, X, y, start, ())


Maker = Callable[[Config, int], Case]
PENALISED: dict[str, Maker] = {
    "ridge": ridge,
    "ridge of matrices": ridge_of_matrices,
    "smooth lasso": smooth,
    "lasso, proximal": lasso,
    "nuclear norm, proximal": nuclear,
    "distance to the start": distance,
    "AdamW": adamw,
    "ridge and smooth lasso": both,
    "label smoothing": smoothed_labels,
    "dropout": dropout,
}
"""Networks with a penalty, by name, in the order of the figure."""
WITHOUT: dict[str, Maker] = {
    "converged": converged,
    "no effect": no_effect,
    "stopped early": stopped_early,
}
"""Networks without one."""


def all_cases() -> Iterator[tuple[str, Maker]]:
    """All kinds of networks by name."""
    yield from PENALISED.items()
    yield from WITHOUT.items()
