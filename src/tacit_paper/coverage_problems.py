"""Problems whose answer is known, for measuring how often an interval holds it."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.equations.difference import difference_equations
from tacit.equations.endpoint import endpoint_equations
from tacit.equations.trajectory import Trajectory, trajectory_equations
from tacit.fitting.fits import Fit, fit
from tacit.objective.objective import Objective
from tacit.objective.params import Params
from tacit.objective.randomness import Noise
from tacit.regularizers import Regularizer, gradient_norm, l1, l2, smooth_l1
from tacit.uncertainty.scores import score_examples


class Replicate(NamedTuple):
    """A fit with its error bars, and the values that it should find."""

    found: Fit
    truth: dict[str, float]


class Problem(NamedTuple):
    """One kind of chance in one setting; a replicate draws it anew from its seed."""

    kind: str
    label: str
    replicate: Callable[[int], Replicate]


class Attentive(nn.Module):
    """A small transformer: embeddings, one layer with attention, the mean over tokens."""

    def __init__(self, words: int, width: int, classes: int):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(1, 8, width) / 4)
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.out = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every sequence."""
        return self.out(self.block(self.words(tokens) + self.places).mean(1))


def regression(size: int, part: int) -> Problem:
    """Parts of a training set, for a small network."""

    def candidates(_: Objective) -> list[Regularizer]:
        return [l2(), smooth_l1(0.1)]

    model, data = _made(41, lambda: _sequential(10, 30, 1)), _products(size)
    return _parts("regression, 361 weights", model, F.mse_loss, data, candidates, part)


def moving(size: int, part: int, *, late: bool) -> Problem:
    """The same with a candidate, ‖∇L‖², that depends on the examples itself.

    Late in training ∇L is mostly noise in a part of the data, and its Hessian product with it.
    """

    def candidates(objective: Objective) -> list[Regularizer]:
        return [l2(), gradient_norm(objective)]

    model, data = _made(41, lambda: _sequential(10, 30, 1)), _products(size)
    label = f"moving design, {'late' if late else 'early'} in training"
    steps = 100 if late else 20
    return _parts(label, model, F.mse_loss, data, candidates, part, steps=steps)


def _products(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(31)
    X = torch.randn(size, 10, generator=generator).double()
    y = X[:, :1] * X[:, 1:2] + X.sum(1, keepdim=True)
    return X, y + torch.randn(size, 1, generator=generator)


def digits(size: int, part: int) -> Problem:
    """Parts of a set of images."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(38))[:size]
    data = torch.from_numpy(images)[chosen] / 16, torch.from_numpy(labels)[chosen]
    model = _made(42, lambda: _sequential(64, 100, 10))

    def candidates(_: Objective) -> list[Regularizer]:
        return [l2(), smooth_l1(1e-2)]

    return _parts("digits, 7,510 weights", model, F.cross_entropy, data, candidates, part)


def transformer(size: int, part: int) -> Problem:
    """Parts of a set of sequences, for a network with attention."""
    generator = torch.Generator().manual_seed(39)
    tokens = torch.randint(16, (size, 8), generator=generator)
    labels = (tokens[:, 0] + tokens.max(1).values) % 4
    model = _made(43, lambda: Attentive(16, 32, 4).double())

    def candidates(_: Objective) -> list[Regularizer]:
        return [l2(), l1()]

    weights = sum(p.numel() for p in model.parameters())
    label = f"transformer, {weights:,} weights"
    return _parts(label, model, F.cross_entropy, (tokens, labels), candidates, part)


def _made(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """A model whose start depends on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def _sequential(inputs: int, width: int, outputs: int, *between: nn.Module) -> nn.Module:
    hidden, out = nn.Linear(inputs, width), nn.Linear(width, outputs)
    return nn.Sequential(hidden, nn.Tanh(), *between, out).double()


def _parts(
    label: str,
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    data: tuple[Tensor, Tensor],
    candidates: Callable[[Objective], list[Regularizer]],
    part: int,
    steps: int = 100,
) -> Problem:
    _train(model, loss, data, steps)
    whole = Objective(model, loss, data)
    truth = fit(endpoint_equations(whole, candidates(whole))).strengths

    def replicate(seed: int) -> Replicate:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(data[1]), generator=generator)[:part]
        objective = Objective(model, loss, (data[0][rows], data[1][rows]))
        regularizers = candidates(objective)
        found = fit(endpoint_equations(objective, regularizers))
        scores = score_examples(found, objective, regularizers, population=len(data[1]))
        return Replicate(found.with_error_bars(scores.error_bars()), dict(truth))

    return Problem("sampling", label, replicate)


def _train(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    data: tuple[Tensor, ...],
    steps: int = 100,
) -> None:
    """Some steps of Adam on the whole set, with weight decay in the loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(data[0]), data[1]).backward()
        optimizer.step()
    optimizer.zero_grad()


def dropout(count: int) -> Problem:
    """Masks of dropout at fixed weights; the truth is the mean over all of them, enumerated."""
    X, y = _waves()
    model = _made(34, lambda: _sequential(5, 8, 1, nn.Dropout(0.2)))
    _train(model.eval(), F.mse_loss, (X, y))
    plain = Objective(model, F.mse_loss, (X, y))
    masks = torch.tensor(list(product((0.0, 1.25), repeat=8)), dtype=torch.float64)
    chance = torch.where(masks == 0, 0.2, 0.8).prod(1)

    def enumerated(model: nn.Module, batch: Any) -> Tensor:
        hidden = model.get_submodule("1")(model.get_submodule("0")(batch[0]))
        outputs = model.get_submodule("3")(hidden * masks[:, None, None, :])[:, 0]
        return ((outputs - batch[1]).square()[..., 0] * chance[:, None]).sum(0)

    exact = Objective.from_batch_loss(model, enumerated, (X, y))
    regularizers = [l2(), smooth_l1(1e-2)]
    truth = fit(difference_equations(exact, plain, regularizers)).strengths

    def replicate(seed: int) -> Replicate:
        drawn = Objective(model, F.mse_loss, (X, y), training=True, draws=count, seed=seed)
        return Replicate(fit(difference_equations(drawn, plain, regularizers)), dict(truth))

    return Problem("draws", f"dropout, {count} draws", replicate)


def input_noise(count: int, many: int) -> Problem:
    """Noise on the inputs in mirrored pairs; the truth is the mean over very many."""
    X, y = _waves()
    model = _made(37, lambda: _sequential(5, 8, 1))
    _train(model, F.mse_loss, (X, y))
    plain, regularizers = Objective(model, F.mse_loss, (X, y)), [l2(), smooth_l1(1e-2)]

    def noisy(model: nn.Module, batch: Any, noise: Noise) -> Tensor:
        return (model(batch[0] + 0.3 * noise.normal(batch[0])) - batch[1]).square()[:, 0]

    def drawn(seed: int, number: int) -> Fit:
        technique = Objective.from_batch_loss(
            model, noisy, (X, y), training=True, draws=number, seed=seed
        )
        return fit(difference_equations(technique, plain, regularizers))

    truth = drawn(10**6, many).strengths
    label = f"noise on inputs, {count} draws in mirrored pairs"
    return Problem("draws", label, lambda seed: Replicate(drawn(seed, count), dict(truth)))


def _waves() -> tuple[Tensor, Tensor]:
    X = torch.randn(50, 5, generator=torch.Generator().manual_seed(33)).double()
    return X, X.sin().sum(1, keepdim=True)


def steps(count: int) -> Problem:
    """Steps of SGD with weight decay: each carries its batch's noise; the truth is the decay."""
    generator = torch.Generator().manual_seed(35)
    X = torch.randn(200, 5, generator=generator).double()
    y = X.sin().sum(1, keepdim=True) + torch.randn(200, 1, generator=generator)
    model = _made(36, lambda: _sequential(5, 8, 1))
    objective = Objective(model, F.mse_loss, (X, y))

    def replicate(seed: int) -> Replicate:
        generator = torch.Generator().manual_seed(seed)
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, weight_decay=0.1)
        points = [_point(trained)]
        for _ in range(count):
            rows = torch.randint(200, (20,), generator=generator)
            optimizer.zero_grad()
            F.mse_loss(trained(X[rows]), y[rows]).backward()
            optimizer.step()
            points.append(_point(trained))
        path = Trajectory.from_positions(points, 0.05)
        return Replicate(fit(trajectory_equations(objective, path, l2())), {"l2": 0.05})

    return Problem("steps", f"{count} steps of SGD with weight decay", replicate)


def _point(model: nn.Module) -> Params:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def layers(count: int) -> Problem:
    """Layers that each have a ridge strength of their own; the truth is their mean."""

    def replicate(seed: int) -> Replicate:
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(100, 6, generator=generator).double()
        Y = torch.randn(100, count, generator=generator).double()
        own = 0.1 * (1 + 0.1 * torch.randn(count, generator=generator).double())
        model = Side(count)
        gram, inner = X.T @ X / 100, X.T @ Y / 100
        for column, linear in enumerate(model.parts):
            ridge = gram + own[column] * count * torch.eye(6).double()
            linear.weight.data = torch.linalg.solve(ridge, inner[:, column])[None]
        objective = Objective(model, F.mse_loss, (X, Y))
        return Replicate(fit(endpoint_equations(objective, l2())), {"l2": 0.1})

    return Problem("layers", f"{count} layers of different strength", replicate)


class Side(nn.Module):
    """Linear layers side by side, one output each."""

    def __init__(self, count: int):
        super().__init__()
        parts = [nn.Linear(6, 1, bias=False).double() for _ in range(count)]
        self.parts = nn.ModuleList(parts)

    def forward(self, inputs: Tensor) -> Tensor:
        """One column a layer."""
        return torch.cat([part(inputs) for part in self.parts], dim=1)
