"""The networks of `step_size`: their data, and training at all step sizes of a width at once."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import Ensemble

if TYPE_CHECKING:
    from tacit_paper.step_size import Config

Examples = tuple[Tensor, Tensor]
"""Inputs, one row an example, and labels."""


class Split(NamedTuple):
    """Examples to train on, to choose a checkpoint by, and to test."""

    train: Examples
    validation: Examples
    test: Examples


def load(
    name: str,
    normalisation: tuple[float, float],
    *,
    train: int,
    validation: int = 0,
    test: int = 0,
    device: str = "cpu",
) -> Split:
    """Normalised pixels: train and validation by a seed-0 permutation, MNIST's test by a seed-1.

    Args:
        name: mnist, or digits, which need no download and whose test examples are what is left.
        normalisation: mean and standard deviation of a pixel.
        train: how many examples to train on.
        validation: how many to choose a checkpoint by.
        test: how many to test.
        device: where they go.
    """
    from tacit_paper import data

    size = train + validation
    if name == "digits":
        pixels, labels = data.digits()
        order = _permutation(len(pixels), seed=0)
        rest = pixels[order[size:]], labels[order[size:]]
    else:
        found = data.mnist()
        pixels, labels = _flat(found.train_images), found.train_labels
        order = _permutation(len(pixels), seed=0)
        chosen = _permutation(len(found.test_images), seed=1)
        rest = _flat(found.test_images)[chosen], found.test_labels[chosen]
    mean, deviation = normalisation
    first, second = order[:train], order[train:size]
    parts = (
        (pixels[first], labels[first]),
        (pixels[second], labels[second]),
        (rest[0][:test], rest[1][:test]),
    )
    return Split(*(((x - mean).div(deviation).to(device), y.to(device)) for x, y in parts))


def _flat(images: Tensor) -> Tensor:
    return images.flatten(1).float() / 255


def _permutation(count: int, *, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def network(sizes: Sequence[int], activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Hidden layers without bias, an output layer with; sizes from inputs to outputs."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes[:-1]):
        layers += [nn.Linear(before, after, bias=False), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class Trained(NamedTuple):
    """Networks of one width, one a step size, at their checkpoints; one number each."""

    ensemble: Ensemble
    epoch: Tensor
    """Of the checkpoint; 0 where there is none."""
    accuracy: Tensor
    """On the training set, at the checkpoint; where there is none, the highest ever."""
    validation: Tensor
    reason: list[str]
    """Why there is no checkpoint."""


def train(config: "Config", split: Split, width: int) -> Trained:
    """Minibatch SGD at all step sizes at once, from one start and through the same batches."""
    X, y = split.train
    sizes = (X.shape[1], *[width] * config.hidden, 10)
    start = ensembles.initialise(partial(network, sizes), [config.seed] * len(config.etas))
    start = start.to(X.device)
    etas = torch.tensor(config.etas, device=X.device)
    weights = {n: p.clone().requires_grad_() for n, p in start.params.items()}
    best = {n: p.clone() for n, p in start.params.items()}
    _, first = scores(start, split.train)
    highest, chosen, accuracy = (torch.zeros_like(etas) for _ in range(3))
    epoch_of, loss = torch.zeros_like(etas, dtype=torch.long), first
    order = ensembles.order_generator(config.seed)
    for epoch in range(1, config.epochs + 1):
        for batch in torch.randperm(len(X), generator=order).to(X.device).split(config.batch_size):
            losses = _losses(start.forward(weights, _for_all(X[batch], etas), None), y[batch])
            slopes = torch.autograd.grad(losses.sum(), list(weights.values()))
            with torch.no_grad():
                for p, slope in zip(weights.values(), slopes, strict=True):
                    p.addcmul_(_beside(etas, p), slope, value=-1)
        now = start.at({n: p.detach() for n, p in weights.items()})
        fitted, loss = scores(now, split.train)
        held_out, _ = scores(now, split.validation)
        better = (fitted >= config.enough) & (held_out > chosen)
        for n, p in now.params.items():
            best[n] = torch.where(_beside(better, p), p, best[n])
        highest = torch.maximum(highest, fitted)
        chosen = torch.where(better, held_out, chosen)
        accuracy = torch.where(better, fitted, accuracy)
        epoch_of = torch.where(better, epoch, epoch_of)
    reason = [
        "" if reached else _reason(*numbers, epochs=config.epochs)
        for reached, *numbers in zip(
            epoch_of.tolist(), highest.tolist(), first.tolist(), loss.tolist(), strict=True
        )
    ]
    accuracy = torch.where(epoch_of > 0, accuracy, highest)
    return Trained(start.at(best), epoch_of, accuracy, chosen, reason)


def _reason(highest: float, first: float, last: float, *, epochs: int) -> str:
    if not last <= first:  # NaN too
        return f"diverged: its loss went from {first:.3g} to {last:.3g}"
    return f"reached {highest:.1%} on the training set in {epochs} epochs"


def _beside(values: Tensor, stacked: Tensor) -> Tensor:
    return values.view(-1, *[1] * (stacked.dim() - 1))


def _for_all(inputs: Tensor, members: Tensor) -> Tensor:
    return inputs.expand(len(members), *inputs.shape)


def _losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of every member."""
    flat = F.cross_entropy(outputs.flatten(0, 1), labels.repeat(len(outputs)), reduction="none")
    return flat.view(len(outputs), -1).mean(1)


@torch.no_grad()
def scores(ensemble: Ensemble, examples: Examples) -> tuple[Tensor, Tensor]:
    """Accuracy and mean loss of every member."""
    X, y = examples
    outputs = ensemble.forward(ensemble.params, _for_all(X, torch.arange(len(ensemble))), None)
    return (outputs.argmax(-1) == y).float().mean(1), _losses(outputs, y)
