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


def load_images(config: Config, device: str) -> Images:
    """The images, shuffled by a permutation with seed 42 and split.

    MNIST has test files. The digits have none, so those that are left over after training are
    divided equally between validation and test.
    """
    if config.data == "mnist":
        mnist = data.mnist()
        X, y = mnist.train_images.flatten(1).float() / 255, mnist.train_labels
        test = (mnist.test_images.flatten(1).float() / 255, mnist.test_labels)
        validation = slice(config.train, None)
    else:
        X, y = data.digits()
        validation = slice(config.train, config.train + (len(X) - config.train) // 2)
        test = None
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(42))
    X, y = X[order].to(device), y[order].to(device)
    if test is None:
        test = (X[validation.stop :], y[validation.stop :])
    return Images(
        (X[: config.train], y[: config.train]),
        (X[validation], y[validation]),
        (test[0].to(device), test[1].to(device)),
    )


def build_network(inputs: int, depth: int, width: int) -> nn.Module:
    """ReLU layers with dropout after every hidden one but the last."""
    layers: list[nn.Module] = []
    for number, (a, b) in enumerate(pairwise((inputs, *[width] * depth)), start=1):
        layers += [nn.Linear(a, b), nn.ReLU(), *([nn.Dropout()] if number < depth else [])]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def initial_ensemble(depth: int, width: int, images: Images, seeds: Sequence[int]) -> Ensemble:
    """The members before training; all rates of one seed have the same weights."""
    pixels = images.train[0]
    ensemble = ensembles.initialise(lambda: build_network(pixels.shape[1], depth, width), seeds)
    return ensemble.to(pixels.device)


@contextmanager
def tf32_products() -> Iterator[None]:
    """Multiply matrices in TF32 on CUDA: precise enough for training, but not for estimates."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def training_plan(config: Config, images: Images, epochs: Sequence[int] | None = None) -> Plan:
    """The published training.

    Args:
        config: the settings.
        images: the images, of which those for validation decide when to stop.
        epochs: epochs of each member, without early stopping. By default training stops early,
            after at most `config.epochs`.
    """
    stopping = Stopping(config.patience, monitor="validation", validation=images.validation)
    return Plan(
        SGD(config.step, momentum=config.momentum, milestones=config.milestones),
        config.epochs if epochs is None else epochs,
        config.batch_size,
        stopping if epochs is None else None,
    )


def accuracies(ensemble: Ensemble, examples: Examples) -> list[float]:
    """The fraction of examples that each member classifies correctly, without dropout."""
    correct = probabilities(ensemble, examples[0]).argmax(-1) == examples[1]
    return correct.double().mean(1).tolist()


def probabilities(ensemble: Ensemble, inputs: Tensor, batch_size: int = 1024) -> Tensor:
    """Predicted probabilities without dropout, (members, examples, classes)."""
    with torch.no_grad():
        outputs = [
            ensemble.forward(ensemble.params, batch.expand(len(ensemble), *batch.shape), None)
            for batch in inputs.split(batch_size)
        ]
    return torch.cat(outputs, 1).softmax(-1)
