"""The networks of the step-size figure: their data, and training at all step sizes at once."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import Ensemble
from tacit_paper import data
from tacit_paper.step_size.config import Config

Examples = tuple[Tensor, Tensor]
"""Inputs, one row per example, and labels."""


class Split(NamedTuple):
    """Examples to train on, to choose a checkpoint by, and to test on."""

    train: Examples
    validation: Examples
    test: Examples


def load_data(config: Config, device: str) -> Split:
    """Normalised pixels and labels, split at random into parts of the configuration's sizes.

    Training and validation examples come from a permutation with seed 0, and the test examples of
    MNIST from a permutation with seed 1. Those of the digits are the examples left over.
    """
    if config.data == "digits":
        pixels, labels = test_pixels, test_labels = data.digits()
    else:
        mnist = data.mnist()
        pixels, labels = mnist.train_images.flatten(1).float() / 255, mnist.train_labels
        test_pixels, test_labels = mnist.test_images.flatten(1).float() / 255, mnist.test_labels
    order = _permutation(len(pixels), seed=0)
    train, validation, rest = order.tensor_split((config.train, config.train + config.validation))
    test = rest if config.data == "digits" else _permutation(len(test_pixels), seed=1)
    parts = (
        (pixels[train], labels[train]),
        (pixels[validation], labels[validation]),
        (test_pixels[test[: config.test]], test_labels[test[: config.test]]),
    )
    mean, deviation = config.normalisation
    return Split(*(((x - mean).div(deviation).to(device), y.to(device)) for x, y in parts))


def _permutation(count: int, *, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def build_network(sizes: Sequence[int], activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Hidden layers without bias and an output layer with bias; sizes from inputs to outputs."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes[:-1]):
        layers += [nn.Linear(inputs, outputs, bias=False), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class TrainedNetworks(NamedTuple):
    """Networks of one width at their checkpoints, one per step size."""

    ensemble: Ensemble
    epoch: Tensor
    """Epoch of the checkpoint; 0 where there is none."""
    accuracy: Tensor
    """Training accuracy at the checkpoint; where there is none, the highest of all epochs."""
    validation: Tensor
    """Validation accuracy at the checkpoint."""
    reason: list[str]
    """Why there is no checkpoint; empty where there is one."""


def train_networks(config: Config, split: Split, width: int) -> TrainedNetworks:
    """Minibatch SGD at all step sizes at once, from the same weights and through the same batches.

    The checkpoint of a network is the epoch of highest validation accuracy among those whose
    training accuracy is at least `config.enough`.
    """
    X, y = split.train
    sizes = (X.shape[1], *[width] * config.hidden, 10)
    initial = ensembles.initialise(partial(build_network, sizes), [config.seed] * len(config.etas))
    initial = initial.to(X.device)
    etas = torch.tensor(config.etas, device=X.device)
    weights = {n: p.clone().requires_grad_() for n, p in initial.params.items()}
    checkpoint = {n: p.clone() for n, p in initial.params.items()}
    _, first_loss = accuracy_and_loss(initial, split.train)
    highest, best_validation, accuracy = (torch.zeros_like(etas) for _ in range(3))
    checkpoint_epoch, last_loss = torch.zeros_like(etas, dtype=torch.long), first_loss
    generator = ensembles.order_generator(config.seed)
    for epoch in range(1, config.epochs + 1):
        order = torch.randperm(len(X), generator=generator).to(X.device)
        for batch in order.split(config.batch_size):
            outputs = initial.forward(weights, _repeat_for_members(X[batch], len(etas)), None)
            losses = _member_losses(outputs, y[batch])
            gradients = torch.autograd.grad(losses.sum(), list(weights.values()))
            with torch.no_grad():
                for p, gradient in zip(weights.values(), gradients, strict=True):
                    p.addcmul_(_align(etas, p), gradient, value=-1)
        current = initial.with_params({n: p.detach() for n, p in weights.items()})
        train_accuracy, last_loss = accuracy_and_loss(current, split.train)
        validation_accuracy, _ = accuracy_and_loss(current, split.validation)
        better = (train_accuracy >= config.enough) & (validation_accuracy > best_validation)
        for n, p in current.params.items():
            checkpoint[n] = torch.where(_align(better, p), p, checkpoint[n])
        highest = torch.maximum(highest, train_accuracy)
        best_validation = torch.where(better, validation_accuracy, best_validation)
        accuracy = torch.where(better, train_accuracy, accuracy)
        checkpoint_epoch = torch.where(better, epoch, checkpoint_epoch)
    numbers = (checkpoint_epoch, highest, first_loss, last_loss)
    reason = [
        "" if reached else _explain_failure(*rest, epochs=config.epochs)
        for reached, *rest in zip(*(number.tolist() for number in numbers), strict=True)
    ]
    accuracy = torch.where(checkpoint_epoch > 0, accuracy, highest)
    return TrainedNetworks(
        initial.with_params(checkpoint), checkpoint_epoch, accuracy, best_validation, reason
    )


def _explain_failure(highest: float, first: float, last: float, *, epochs: int) -> str:
    if not last <= first:  # NaN too
        return f"diverged: its loss went from {first:.3g} to {last:.3g}"
    return f"reached {highest:.1%} on the training set in {epochs} epochs"


def _align(values: Tensor, stacked: Tensor) -> Tensor:
    """One value per member, shaped so that it broadcasts over a stacked tensor."""
    return values.view(-1, *[1] * (stacked.dim() - 1))


def _repeat_for_members(inputs: Tensor, members: int) -> Tensor:
    return inputs.expand(members, *inputs.shape)


def _member_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of every member."""
    losses = F.cross_entropy(outputs.flatten(0, 1), labels.repeat(len(outputs)), reduction="none")
    return losses.view(len(outputs), -1).mean(1)


@torch.no_grad()
def accuracy_and_loss(ensemble: Ensemble, examples: Examples) -> tuple[Tensor, Tensor]:
    """Accuracy and mean loss of every member."""
    X, y = examples
    outputs = ensemble.forward(ensemble.params, _repeat_for_members(X, len(ensemble)), None)
    return (outputs.argmax(-1) == y).float().mean(1), _member_losses(outputs, y)
