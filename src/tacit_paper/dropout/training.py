"""Images, networks and training of the dropout figure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tacit import ensembles
from tacit.ensembles import SGD, Ensemble, Plan, Stopping
from tacit_paper import data
from tacit_paper.dropout.config import Config

Examples = tuple[Tensor, Tensor]
"""Flat images with pixels from 0 to 1, and their labels."""


class Images(NamedTuple):
    """Examples to train on, to stop training by, and to test on."""

    train: Examples
    validation: Examples
    test: Examples


def load_images(config: Config, device: str, *, shuffled: bool = True) -> Images:
    """The images, split after a permutation with seed 42 or, if not `shuffled`, in their order.

    MNIST has test files. The digits have none, so those that are left over after training are
    divided equally between validation and test.
    """
    test = None
    if config.data == "mnist":
        X, y, test_images, test_labels = data.mnist()
        X, test = X.flatten(1).float() / 255, (test_images.flatten(1).float() / 255, test_labels)
        stop = len(X)
    else:
        X, y = data.digits()
        stop = config.train + (len(X) - config.train) // 2
    if shuffled:
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(42))
        X, y = X[order], y[order]
    X, y = (tensor.to(device).tensor_split([config.train, stop]) for tensor in (X, y))
    train, validation, rest = zip(X, y, strict=True)
    images, labels = test or rest
    return Images(train, validation, (images.to(device), labels.to(device)))


def normalise(images: Images) -> Images:
    """The images with pixels (x − 0.1307)/0.3081, MNIST's mean and standard deviation."""
    return Images(*(((pixels - 0.1307) / 0.3081, labels) for pixels, labels in images))


def build_network(inputs: int, depth: int, width: int, *, dropout_layers: int) -> nn.Sequential:
    """ReLU layers, with dropout after the first ones; in the paper after all but the last."""
    layers: list[nn.Module] = []
    for number, (a, b) in enumerate(pairwise((inputs, *[width] * depth)), start=1):
        dropout = [nn.Dropout()] if number <= dropout_layers else []
        layers += [nn.Linear(a, b), nn.ReLU(), *dropout]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def initial_ensemble(
    depth: int,
    width: int,
    images: Images,
    seeds: Sequence[int],
    *,
    dropout_layers: int | None = None,
) -> Ensemble:
    """The members before training; all rates of one seed have the same weights.

    There is dropout after the first `dropout_layers` hidden layers, by default as in the paper
    after every hidden layer but the last.
    """
    pixels, layers = images.train[0], depth - 1 if dropout_layers is None else dropout_layers
    ensemble = ensembles.initialise(
        lambda: build_network(pixels.shape[1], depth, width, dropout_layers=layers), seeds
    )
    return ensemble.to(pixels.device)


def training_plan(config: Config, images: Images, epochs: Sequence[int] | None = None) -> Plan:
    """The published training.

    Args:
        config: the settings.
        images: the images, of which those for validation decide when to stop.
        epochs: epochs of each member, without early stopping. By default training stops early,
            after at most `config.epochs`.
    """
    optimizer = SGD(config.step, momentum=config.momentum, milestones=config.milestones)
    if epochs is not None:
        return Plan(optimizer, epochs, config.batch_size)
    stopping = Stopping(config.patience, monitor="validation", validation=images.validation)
    return Plan(optimizer, config.epochs, config.batch_size, stopping)


@contextmanager
def _tf32_products() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


train = _tf32_products()(ensembles.train)
"""Train with products of matrices in TF32 on CUDA: precise enough here, but not for estimates."""


def accuracies(ensemble: Ensemble, examples: Examples) -> list[float]:
    """The fraction of examples that each member classifies correctly, without dropout."""
    correct = log_probabilities(ensemble, examples[0]).argmax(-1) == examples[1]
    return correct.double().mean(1).tolist()


def log_probabilities(ensemble: Ensemble, inputs: Tensor, batch_size: int = 1024) -> Tensor:
    """Logs of predicted probabilities without dropout, (members, examples, classes), in float64."""
    with torch.no_grad():
        outputs = [
            ensemble.forward(ensemble.params, batch.expand(len(ensemble), *batch.shape), None)
            for batch in inputs.split(batch_size)
        ]
    return torch.cat(outputs, 1).double().log_softmax(-1)
