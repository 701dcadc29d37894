"""What dropout adds to the gradient of trained networks, explained by moments and by others."""

import time
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from torch import nn
from torch.nn import functional as F

from tacit.ensembles import Adam, Ensemble, Plan, Run, Stopping
from tacit_paper import Row
from tacit_paper.dropout import training
from tacit_paper.dropout.estimates import marginal_effects, total_effects
from tacit_paper.dropout.training import Images
from tacit_paper.dropout_moments.columns import cost_columns, moments_column
from tacit_paper.dropout_moments.config import Config, Networks


class Trained(NamedTuple):
    """Networks, all with the same rates or none, and the images that they were trained on."""

    run: Run
    images: Images
    rates: list[float]
    seeds: list[int]
    seconds: float


def paper_rows(config: Config, device: str, shape: Networks, rate: float) -> Iterator[Row]:
    """What dropout adds to the paper's networks at one rate, at the best validation loss."""
    images = training.load_images(config.training, device)
    seeds = list(config.training.seeds[: shape.seeds])
    initial = training.initial_ensemble(shape.depth, shape.width, images, seeds)
    plan = training.training_plan(config.training, images)
    trained = _train(initial, plan, images, [rate] * len(seeds), seeds)
    yield from _rows("paper", config, shape, trained)


def every_layer_rows(config: Config, device: str, shape: Networks, rate: float) -> Iterator[Row]:
    """The same with dropout after every hidden layer, trained by Adam on normalised pixels."""
    settings = config.every_layer
    images = training.normalise(training.load_images(config.training, device, shuffled=False))
    seeds = list(config.training.seeds[: shape.seeds])
    depth, width = shape.depth, shape.width
    initial = training.initial_ensemble(depth, width, images, seeds, dropout_layers=depth)
    # A patience of all epochs never stops a run; it makes `best` the weights of best validation.
    stopping = Stopping(settings.epochs, monitor="validation", validation=images.validation)
    plan = Plan(Adam(settings.step), settings.epochs, settings.batch_size, stopping)
    trained = _train(initial, plan, images, [rate] * len(seeds), seeds)
    yield from _rows("every layer", config, shape, trained)


def one_layer_rows(config: Config, device: str) -> Iterator[Row]:
    """The paper's networks with one hidden layer: dropout layers, and the exact ridge strength."""
    shape, images = config.one_layer, training.load_images(config.training, device)
    members = list(product(shape.rates, config.training.seeds[: shape.seeds]))
    seeds = [seed for _, seed in members]
    initial = training.initial_ensemble(shape.depth, shape.width, images, seeds)
    layers = sum(isinstance(module, nn.Dropout) for module in initial.model.modules())
    rates = [rate for rate, _ in members] if layers else None
    plan = training.training_plan(config.training, images)
    trained = _train(initial, plan, images, rates, seeds)
    effects = total_effects(config.training, trained.run.last, images)
    for (rate, seed), effect in zip(members, effects, strict=True):
        label = {"kind": "one layer", "depth": shape.depth, "width": shape.width}
        yield {**label, "rate": rate, "seed": seed, "dropout_layers": layers, **effect}


def _train(
    initial: Ensemble, plan: Plan, images: Images, rates: list[float] | None, seeds: list[int]
) -> Trained:
    start = time.perf_counter()
    run = training.train(initial, F.cross_entropy, images.train, plan, seeds=seeds, dropout=rates)
    seconds = time.perf_counter() - start
    return Trained(run, images, rates or [0.0] * len(seeds), seeds, seconds)


def _rows(kind: str, config: Config, shape: Networks, trained: Trained) -> Iterator[Row]:
    """What dropout adds at the best weights, over the first images, and what that cost."""
    run, images, rates, seeds, train_seconds = trained
    part = images._replace(train=tuple(tensor[: config.examples] for tensor in images.train))
    start = time.perf_counter()
    moments = moments_column(run.best, part.train, rates)
    effects = marginal_effects(config.training, run.best, part, rates, seeds, extra=moments)
    accuracies = training.accuracies(run.best, images.test)
    label = {"depth": shape.depth, "width": shape.width, "rate": rates[0]}
    for m, effect in enumerate(effects):
        yield {
            "kind": kind,
            **label,
            "seed": seeds[m],
            "best_epochs": int(run.best_epoch[m]) + 1,
            "test_accuracy": accuracies[m],
            **effect,
        }
    seconds = {"train_seconds": train_seconds, "effect_seconds": time.perf_counter() - start}
    cost = cost_columns(config.cost_examples, run.best, images.train, rates[0])
    yield {"kind": f"{kind}, cost", **label, **seconds, **cost}
