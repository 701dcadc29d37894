"""Cases whose true strengths are known, for measuring how often an interval contains them."""

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
    """A fit with its error bars, and the true strengths by name."""

    fit: Fit
    truth: dict[str, float]


class Case(NamedTuple):
    """One source of randomness in one setting."""

    source: str
    """The kind of error bars that the source of randomness belongs to."""
    label: str
    replicate: Callable[[int], Replicate]
    """Makes the replicate of a seed."""


class TinyTransformer(nn.Module):
    """A small transformer: embeddings, one layer with attention, the mean over tokens."""

    def __init__(self, words: int, width: int, classes: int):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(1, 8, width) / 4)
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.out = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every sequence."""
        return self.out(self.block(self.words(tokens) + self.positions).mean(1))


def regression(examples: int, part: int) -> Case:
    """Random parts of a training set, for a small regression network."""

    def candidates(_: Objective) -> list[Regularizer]:
        return [l2(), smooth_l1(0.1)]

    model, data = _build(41, lambda: _tanh_network(10, 30, 1)), _regression_data(examples)
    return _sampling_case("regression, 361 weights", model, F.mse_loss, data, candidates, part)


def moving_design(examples: int, part: int, *, late: bool) -> Case:
    """The regression network with a candidate, ‖∇L‖², that depends on the examples itself.

    Late in training ∇L on a part of the data is mostly noise, and so is the column 2H∇L.
    """

    def candidates(objective: Objective) -> list[Regularizer]:
        return [l2(), gradient_norm(objective)]

    model, data = _build(41, lambda: _tanh_network(10, 30, 1)), _regression_data(examples)
    label = f"moving design, {'late' if late else 'early'} in training"
    steps = 100 if late else 20
    return _sampling_case(label, model, F.mse_loss, data, candidates, part, steps=steps)


def _regression_data(examples: int) -> tuple[Tensor, Tensor]:
    """Inputs, and targets y = x₁x₂ + Σxᵢ + noise."""
    generator = torch.Generator().manual_seed(31)
    X = torch.randn(examples, 10, generator=generator).double()
    y = X[:, :1] * X[:, 1:2] + X.sum(1, keepdim=True)
    return X, y + torch.randn(examples, 1, generator=generator)


def digits(examples: int, part: int) -> Case:
    """Random parts of a set of images, for a small classifier."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(38))[:examples]
    data = torch.from_numpy(images)[chosen] / 16, torch.from_numpy(labels)[chosen]
    model = _build(42, lambda: _tanh_network(64, 100, 10))

    def candidates(_: Objective) -> list[Regularizer]:
        return [l2(), smooth_l1(1e-2)]

    return _sampling_case("digits, 7,510 weights", model, F.cross_entropy, data, candidates, part)


def transformer(examples: int, part: int) -> Case:
    """Random parts of a set of sequences, for a network with attention."""
    generator = torch.Generator().manual_seed(39)
    tokens = torch.randint(16, (examples, 8), generator=generator)
    labels = (tokens[:, 0] + tokens.max(1).values) % 4
    model = _build(43, lambda: TinyTransformer(16, 32, 4).double())

    def candidates(_: Objective) -> list[Regularizer]:
        return [l2(), l1()]

    weights = sum(p.numel() for p in model.parameters())
    label = f"transformer, {weights:,} weights"
    return _sampling_case(label, model, F.cross_entropy, (tokens, labels), candidates, part)


def _build(seed: int, make_model: Callable[[], nn.Module]) -> nn.Module:
    """A model whose initial weights depend only on the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make_model()


def _tanh_network(inputs: int, width: int, outputs: int, *after_tanh: nn.Module) -> nn.Module:
    hidden, out = nn.Linear(inputs, width), nn.Linear(width, outputs)
    return nn.Sequential(hidden, nn.Tanh(), *after_tanh, out).double()


def _sampling_case(
    label: str,
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    data: tuple[Tensor, Tensor],
    candidates: Callable[[Objective], list[Regularizer]],
    part: int,
    steps: int = 100,
) -> Case:
    """Random parts of the data at fixed weights; the truth is the strength on all data."""
    _train(model, loss, data, steps)
    objective_on_all = Objective(model, loss, data)
    truth = fit(endpoint_equations(objective_on_all, candidates(objective_on_all))).strengths

    def replicate(seed: int) -> Replicate:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(data[1]), generator=generator)[:part]
        objective = Objective(model, loss, (data[0][rows], data[1][rows]))
        regularizers = candidates(objective)
        part_fit = fit(endpoint_equations(objective, regularizers))
        scores = score_examples(part_fit, population=len(data[1]))
        return Replicate(part_fit.with_error_bars(scores.error_bars()), dict(truth))

    return Case("sampling", label, replicate)


def _train(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    data: tuple[Tensor, ...],
    steps: int = 100,
) -> None:
    """Some full-batch steps of Adam, with weight decay added to the gradient."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(data[0]), data[1]).backward()
        optimizer.step()
    optimizer.zero_grad()


def dropout(draws: int) -> Case:
    """Dropout masks at fixed weights; the truth is the mean over all masks, by enumeration."""
    X, y = _sine_data()
    model = _build(34, lambda: _tanh_network(5, 8, 1, nn.Dropout(0.2)))
    _train(model.eval(), F.mse_loss, (X, y))
    plain = Objective(model, F.mse_loss, (X, y))
    masks = torch.tensor(list(product((0.0, 1.25), repeat=8)), dtype=torch.float64)
    probabilities = torch.where(masks == 0, 0.2, 0.8).prod(1)

    def expected_loss(model: nn.Module, batch: Any) -> Tensor:
        hidden = model.get_submodule("1")(model.get_submodule("0")(batch[0]))
        outputs = model.get_submodule("3")(hidden * masks[:, None, None, :])[:, 0]
        return ((outputs - batch[1]).square()[..., 0] * probabilities[:, None]).sum(0)

    expectation = Objective.from_batch_loss(model, expected_loss, (X, y))
    regularizers = [l2(), smooth_l1(1e-2)]
    truth = fit(difference_equations(expectation, plain, regularizers)).strengths

    def replicate(seed: int) -> Replicate:
        technique = Objective(model, F.mse_loss, (X, y), training=True, draws=draws, seed=seed)
        return Replicate(fit(difference_equations(technique, plain, regularizers)), dict(truth))

    return Case("draws", f"dropout, {draws} draws", replicate)


def input_noise(draws: int, many: int) -> Case:
    """Noise on the inputs in mirrored pairs; the truth is the mean over `many` draws."""
    X, y = _sine_data()
    model = _build(37, lambda: _tanh_network(5, 8, 1))
    _train(model, F.mse_loss, (X, y))
    plain, regularizers = Objective(model, F.mse_loss, (X, y)), [l2(), smooth_l1(1e-2)]

    def noisy_loss(model: nn.Module, batch: Any, noise: Noise) -> Tensor:
        return (model(batch[0] + 0.3 * noise.normal(batch[0])) - batch[1]).square()[:, 0]

    def fit_draws(seed: int, count: int) -> Fit:
        technique = Objective.from_batch_loss(
            model, noisy_loss, (X, y), training=True, draws=count, seed=seed
        )
        return fit(difference_equations(technique, plain, regularizers))

    truth = fit_draws(10**6, many).strengths
    label = f"noise on inputs, {draws} draws in mirrored pairs"
    return Case("draws", label, lambda seed: Replicate(fit_draws(seed, draws), dict(truth)))


def _sine_data() -> tuple[Tensor, Tensor]:
    """Inputs, and targets y = Σ sin xᵢ without noise."""
    X = torch.randn(50, 5, generator=torch.Generator().manual_seed(33)).double()
    return X, X.sin().sum(1, keepdim=True)


def sgd_steps(count: int) -> Case:
    """Steps of SGD with weight decay, each with its batch's noise; the truth is the decay.

    torch's `weight_decay` of 0.1 is a ridge strength of 0.05, because `l2` is ‖θ‖².
    """
    generator = torch.Generator().manual_seed(35)
    X = torch.randn(200, 5, generator=generator).double()
    y = X.sin().sum(1, keepdim=True) + torch.randn(200, 1, generator=generator)
    model = _build(36, lambda: _tanh_network(5, 8, 1))
    objective = Objective(model, F.mse_loss, (X, y))

    def replicate(seed: int) -> Replicate:
        generator = torch.Generator().manual_seed(seed)
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, weight_decay=0.1)
        positions = [_copy_params(trained)]
        for _ in range(count):
            rows = torch.randint(200, (20,), generator=generator)
            optimizer.zero_grad()
            F.mse_loss(trained(X[rows]), y[rows]).backward()
            optimizer.step()
            positions.append(_copy_params(trained))
        trajectory = Trajectory.from_positions(positions, 0.05)
        return Replicate(fit(trajectory_equations(objective, trajectory, l2())), {"l2": 0.05})

    return Case("steps", f"{count} steps of SGD with weight decay", replicate)


def _copy_params(model: nn.Module) -> Params:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def unequal_layers(count: int) -> Case:
    """Layers with different ridge strengths, drawn around a mean; the truth is that mean.

    Every layer minimises its part of the mean squared error plus its ridge penalty in closed form.
    """

    def replicate(seed: int) -> Replicate:
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(100, 6, generator=generator).double()
        Y = torch.randn(100, count, generator=generator).double()
        strengths = 0.1 * (1 + 0.1 * torch.randn(count, generator=generator).double())
        model = ParallelLayers(count)
        gram, inner = X.T @ X / 100, X.T @ Y / 100
        for column, layer in enumerate(model.layers):
            penalised = gram + strengths[column] * count * torch.eye(6).double()
            layer.weight.data = torch.linalg.solve(penalised, inner[:, column])[None]
        objective = Objective(model, F.mse_loss, (X, Y))
        return Replicate(fit(endpoint_equations(objective, l2())), {"l2": 0.1})

    return Case("layers", f"{count} layers of different strength", replicate)


class ParallelLayers(nn.Module):
    """Linear layers of the same inputs, with one output each."""

    def __init__(self, count: int):
        super().__init__()
        layers = [nn.Linear(6, 1, bias=False).double() for _ in range(count)]
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of all layers, one column per layer."""
        return torch.cat([layer(inputs) for layer in self.layers], dim=1)
