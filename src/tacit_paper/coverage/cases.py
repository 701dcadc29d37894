"""Cases whose true strengths are known, for measuring how often an interval contains them."""

import copy
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import Fit, Objective, Regularizer, fit, record, score_examples
from tacit.equations import difference_equations, endpoint_equations, trajectory_equations
from tacit.objective import Noise
from tacit.objective.losses import Loss
from tacit.regularizers import gradient_norm, l1, l2, smooth_l1

Examples = tuple[Tensor, Tensor]
Candidate = Callable[[Objective], Regularizer]
"""Makes a regularizer, which may depend on the examples of the objective."""


class Case(NamedTuple):
    """One source of randomness in one setting."""

    source: str
    """The kind of error bars that the source of randomness belongs to."""
    label: str
    truth: Mapping[str, float]
    """The true strengths by name."""
    replicate: Callable[[int], Fit]
    """Makes the replicate of a seed: a fit with its error bars."""


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
    return _regression_case("regression, 361 weights", examples, part, lambda _: smooth_l1(0.1))


def moving_design(examples: int, part: int, *, late: bool) -> Case:
    """The regression network with a candidate, ‖∇L‖², that depends on the examples itself.

    Late in training ∇L on a part of the data is mostly noise, and so is the column 2H∇L.
    """
    label = f"moving design, {'late' if late else 'early'} in training"
    return _regression_case(label, examples, part, gradient_norm, steps=100 if late else 20)


def _regression_case(
    label: str, examples: int, part: int, second: Candidate, steps: int = 100
) -> Case:
    """Targets y = x₁x₂ + Σxᵢ + noise."""
    generator = torch.Generator().manual_seed(31)
    X = torch.randn(examples, 10, generator=generator).double()
    y = X[:, :1] * X[:, 1:2] + X.sum(1, keepdim=True)
    data = (X, y + torch.randn(examples, 1, generator=generator))
    model = _train(_build(41, lambda: _tanh_network(10, 30, 1)), F.mse_loss, data, steps)
    return _sampling_case(label, model, F.mse_loss, data, part, second)


def digits(examples: int, part: int) -> Case:
    """Random parts of a set of images, for a small classifier."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(38))[:examples]
    data = torch.from_numpy(images)[chosen] / 16, torch.from_numpy(labels)[chosen]
    model = _train(_build(42, lambda: _tanh_network(64, 100, 10)), F.cross_entropy, data)
    label = "digits, 7,510 weights"
    return _sampling_case(label, model, F.cross_entropy, data, part, lambda _: smooth_l1(1e-2))


def transformer(examples: int, part: int) -> Case:
    """Random parts of a set of sequences, for a network with attention."""
    generator = torch.Generator().manual_seed(39)
    tokens = torch.randint(16, (examples, 8), generator=generator)
    data = (tokens, (tokens[:, 0] + tokens.max(1).values) % 4)
    model = _train(_build(43, lambda: TinyTransformer(16, 32, 4).double()), F.cross_entropy, data)
    label = f"transformer, {sum(p.numel() for p in model.parameters()):,} weights"
    return _sampling_case(label, model, F.cross_entropy, data, part, lambda _: l1())


def _build(seed: int, make_model: Callable[[], nn.Module]) -> nn.Module:
    """A model whose initial weights depend only on the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make_model()


def _tanh_network(inputs: int, width: int, outputs: int, *after_tanh: nn.Module) -> nn.Module:
    hidden, out = nn.Linear(inputs, width), nn.Linear(width, outputs)
    return nn.Sequential(hidden, nn.Tanh(), *after_tanh, out).double()


def _train(model: nn.Module, loss: Loss, data: Examples, steps: int = 100) -> nn.Module:
    """The model after full-batch steps of Adam, with weight decay added to the gradient."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(data[0]), data[1]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model


def _sampling_case(
    label: str, model: nn.Module, loss: Loss, data: Examples, part: int, second: Candidate
) -> Case:
    """Random parts of the data at fixed weights; the truth is the strength on all data.

    Both strengths are estimated: that of `l2` and that of a second candidate.
    """

    def fit_to(objective: Objective) -> Fit:
        return fit(endpoint_equations(objective, [l2(), second(objective)]))

    def replicate(seed: int) -> Fit:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(data[1]), generator=generator)[:part]
        part_fit = fit_to(Objective(model, loss, (data[0][rows], data[1][rows])))
        scores = score_examples(part_fit, population=len(data[1]))
        return part_fit.with_error_bars(scores.error_bars())

    return Case("sampling", label, fit_to(Objective(model, loss, data)).strengths, replicate)


def dropout(draws: int) -> Case:
    """Dropout masks at fixed weights; the truth is the mean over all masks, by enumeration."""
    data, regularizers = _sine_data(), [l2(), smooth_l1(1e-2)]
    model = _build(34, lambda: _tanh_network(5, 8, 1, nn.Dropout(0.2)))
    plain = Objective(_train(model.eval(), F.mse_loss, data), F.mse_loss, data)
    masks = torch.tensor(list(product((0.0, 1.25), repeat=8)), dtype=torch.float64)
    probabilities = torch.where(masks == 0, 0.2, 0.8).prod(1)

    def expected_loss(model: nn.Module, batch: Any) -> Tensor:
        hidden = model.get_submodule("1")(model.get_submodule("0")(batch[0]))
        outputs = model.get_submodule("3")(hidden * masks[:, None, None, :])[:, 0]
        return ((outputs - batch[1]).square()[..., 0] * probabilities[:, None]).sum(0)

    expectation = Objective.from_batch_loss(model, expected_loss, data)
    truth = fit(difference_equations(expectation, plain, regularizers)).strengths

    def replicate(seed: int) -> Fit:
        technique = Objective(model, F.mse_loss, data, training=True, draws=draws, seed=seed)
        return fit(difference_equations(technique, plain, regularizers))

    return Case("draws", f"dropout, {draws} draws", truth, replicate)


def input_noise(draws: int, many: int) -> Case:
    """Noise on the inputs in mirrored pairs; the truth is the mean over `many` draws."""
    data, regularizers = _sine_data(), [l2(), smooth_l1(1e-2)]
    model = _train(_build(37, lambda: _tanh_network(5, 8, 1)), F.mse_loss, data)
    plain = Objective(model, F.mse_loss, data)

    def noisy_loss(model: nn.Module, batch: Any, noise: Noise) -> Tensor:
        return (model(batch[0] + 0.3 * noise.normal(batch[0])) - batch[1]).square()[:, 0]

    def fit_draws(seed: int, count: int) -> Fit:
        technique = Objective.from_batch_loss(
            model, noisy_loss, data, training=True, draws=count, seed=seed
        )
        return fit(difference_equations(technique, plain, regularizers))

    truth = fit_draws(10**6, many).strengths
    label = f"noise on inputs, {draws} draws in mirrored pairs"
    return Case("draws", label, truth, lambda seed: fit_draws(seed, draws))


def _sine_data() -> Examples:
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

    def replicate(seed: int) -> Fit:
        generator = torch.Generator().manual_seed(seed)
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, weight_decay=0.1)
        recorder = record(trained, optimizer)
        for _ in range(count):
            rows = torch.randint(200, (20,), generator=generator)
            optimizer.zero_grad()
            F.mse_loss(trained(X[rows]), y[rows]).backward()
            optimizer.step()
            recorder.step()
        return fit(trajectory_equations(objective, recorder.trajectory(), l2()))

    return Case("steps", f"{count} steps of SGD with weight decay", {"l2": 0.05}, replicate)


def unequal_layers(count: int) -> Case:
    """Layers with different ridge strengths, drawn around a mean; the truth is that mean.

    Every layer minimises its part of the mean squared error plus its ridge penalty in closed form.
    """

    def replicate(seed: int) -> Fit:
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(100, 6, generator=generator).double()
        Y = torch.randn(100, count, generator=generator).double()
        strengths = 0.1 * (1 + 0.1 * torch.randn(count, generator=generator).double())
        model = ParallelLayers(nn.Linear(6, 1, bias=False).double() for _ in range(count))
        gram, inner = X.T @ X / 100, X.T @ Y / 100
        for column, layer in enumerate(model):
            penalised = gram + strengths[column] * count * torch.eye(6).double()
            layer.weight.data = torch.linalg.solve(penalised, inner[:, column])[None]
        return fit(endpoint_equations(Objective(model, F.mse_loss, (X, Y)), l2()))

    return Case("layers", f"{count} layers of different strength", {"l2": 0.1}, replicate)


class ParallelLayers(nn.ModuleList):
    """Linear layers of the same inputs, with one output each."""

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of all layers, one column per layer."""
        return torch.cat([layer(inputs) for layer in self], dim=1)
