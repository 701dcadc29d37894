"""Networks with dropout after every hidden layer, trained by Adam on normalised pixels."""

import time
from collections.abc import Iterator
from itertools import product

from torch.nn import functional as F

from tacit.ensembles import Adam, Plan, Stopping
from tacit_paper import Row
from tacit_paper.dropout import training
from tacit_paper.dropout.config import Config
from tacit_paper.dropout.estimates import marginal_effects
from tacit_paper.dropout.moments import cost_columns


def every_layer_rows(
    config: Config, device: str, depth: int, width: int, rates: tuple[float, ...]
) -> Iterator[Row]:
    """The marginal effect of dropout at the best validation loss, all rates of an architecture."""
    settings = config.every_layer
    images = training.normalise(training.load_images(config, device, shuffled=False))
    members = list(product(rates, config.seeds[: settings.seeds]))
    member_rates, seeds = [rate for rate, _ in members], [seed for _, seed in members]
    # A patience of all epochs never stops a run; it makes `best` the weights of best validation.
    stopping = Stopping(settings.epochs, monitor="validation", validation=images.validation)
    plan = Plan(Adam(settings.step), settings.epochs, settings.batch_size, stopping)
    initial = training.initial_ensemble(depth, width, images, seeds, dropout_layers=depth)
    start = time.perf_counter()
    run = training.train(
        initial, F.cross_entropy, images.train, plan, seeds=seeds, dropout=member_rates
    )
    trained = time.perf_counter()
    effects = marginal_effects(config, run.best, images, member_rates, seeds, moments=True)
    accuracies = training.accuracies(run.best, images.test)
    shape = {"depth": depth, "width": width}
    for m, effect in enumerate(effects):
        yield {
            "kind": "every layer",
            "weights": "best",
            **shape,
            "rate": member_rates[m],
            "seed": seeds[m],
            "best_epochs": int(run.best_epoch[m]) + 1,
            "test_accuracy": accuracies[m],
            **effect,
        }
    seconds = {"train_seconds": trained - start, "marginal_seconds": time.perf_counter() - trained}
    yield {"kind": "every layer time", **shape, **seconds}
    cost = cost_columns(config, run.best, images.train, rates[0])
    yield {"kind": "every layer cost", **shape, "rate": rates[0], **cost}
