"""Settings, images, networks and training of the `dropout` figure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tacit import ensembles
from tacit.ensembles import SGD, Ensemble, Plan, Stopping


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    data: str = "mnist"
    depths: tuple[int, ...] = (3, 5)
    """Hidden layers."""
    widths: tuple[int, ...] = (128, 256, 512)
    rates: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
    seeds: tuple[int, ...] = (123, 42, 666, 314, 17, 111, 325, 643, 432, 51)
    train: int = 54_000
    """Examples that are trained on; the rest of the training files validates."""
    step: float = 0.05
    momentum: float = 0.9
    milestones: tuple[int, ...] = (60, 100, 200)
    epochs: int = 500
    batch_size: int = 2048
    patience: int = 50
    best_seeds: int = 6
    """Seeds whose marginal effect is estimated at the weights of the best validation loss …"""
    last_seeds: int = 3
    """… and at the last weights, which takes many more masks."""
    noise: float = 0.05
    """Part of the marginal target's squared norm that may be the masks' noise."""
    fit_rate: float = 0.05
    fit_epochs: int = 2000
    fit_patience: int = 100
    fit_plateau: int = 10
    shuffles: int = 3
    """Shuffles of minibatches that the published fit goes through in turn."""
    retrained: tuple[int, int] = (3, 256)
    """Depth and width of the networks that are trained again …"""
    retrained_rates: tuple[float, ...] = (0.05, 0.1, 0.2)
    """… without dropout."""


class Images(NamedTuple):
    """Flat images with pixels from 0 to 1, and their labels."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load(config: Config, device: str) -> Images:
    """The images, split by a permutation of seed 42; digits leave their last part for testing."""
    from tacit_paper import data

    if config.data == "mnist":
        files = data.mnist()
        X, y = files.train_images.flatten(1).float() / 255, files.train_labels
        test = (files.test_images.flatten(1).float() / 255, files.test_labels)
        held = slice(config.train, None)
    else:
        X, y = data.digits()
        held = slice(config.train, config.train + (len(X) - config.train) // 2)
        test = None
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(42))
    X, y = X[order].to(device), y[order].to(device)
    own = (X[: config.train], y[: config.train])
    if test is None:
        test = (X[held.stop :], y[held.stop :])
    return Images(own, (X[held], y[held]), (test[0].to(device), test[1].to(device)))


def network(inputs: int, depth: int, width: int) -> nn.Module:
    """Dropout after every hidden ReLU but the last."""
    layers: list[nn.Module] = []
    for number, (a, b) in enumerate(pairwise((inputs, *[width] * depth)), start=1):
        layers += [nn.Linear(a, b), nn.ReLU(), *([nn.Dropout()] if number < depth else [])]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def start(config: Config, depth: int, width: int, images: Images, seeds: Sequence[int]) -> Ensemble:
    """Members as initialised, alike for all rates of a seed."""
    inputs = images.train[0].shape[1]
    made = ensembles.initialise(lambda: network(inputs, depth, width), seeds)
    return made.to(images.train[0].device)


@contextmanager
def fast_products() -> Iterator[None]:
    """Products of matrices in TF32 on CUDA: enough for training, not for estimates."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def plan(config: Config, images: Images, epochs: Sequence[int] | None = None) -> Plan:
    """The published training; given epochs are not cut short."""
    stopping = Stopping(config.patience, monitor="validation", validation=images.validation)
    return Plan(
        SGD(config.step, momentum=config.momentum, milestones=config.milestones),
        config.epochs if epochs is None else epochs,
        config.batch_size,
        stopping if epochs is None else None,
    )


def accuracy(ensemble: Ensemble, data: tuple[Tensor, Tensor]) -> list[float]:
    """Part of the examples that each member classifies rightly, without dropout."""
    hits = probabilities(ensemble, data[0]).argmax(-1) == data[1]
    return hits.double().mean(1).tolist()


def probabilities(ensemble: Ensemble, inputs: Tensor, at_once: int = 1024) -> Tensor:
    """Predicted probabilities, (members, examples, classes)."""
    with torch.no_grad():
        parts = [
            ensemble.forward(ensemble.params, part.expand(len(ensemble), *part.shape), None)
            for part in inputs.split(at_once)
        ]
    return torch.cat(parts, 1).softmax(-1)
