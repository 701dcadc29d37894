"""The paper's networks: all rates and seeds of one architecture."""

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from torch.nn import functional as F

from tacit.ensembles import Ensemble, Run
from tacit_paper import Row
from tacit_paper.dropout import training
from tacit_paper.dropout.config import Config
from tacit_paper.dropout.estimates import marginal_effects, total_effects
from tacit_paper.dropout.training import Images


def architecture_rows(config: Config, device: str, depth: int, width: int) -> Iterator[Row]:
    """All rates and seeds of one architecture: networks, marginal effects and times."""
    images = training.load_images(config, device)
    members = list(product(config.rates, config.seeds))
    rates, seeds = [rate for rate, _ in members], [seed for _, seed in members]
    times = [time.perf_counter()]
    initial = training.initial_ensemble(depth, width, images, seeds)
    plan = training.training_plan(config, images)
    run = training.train(initial, F.cross_entropy, images.train, plan, seeds=seeds, dropout=rates)
    times.append(time.perf_counter())
    shape = {"depth": depth, "width": width}
    kinds = ["diverged" if lost else "model" for lost in run.diverged.tolist()]
    rows: list[Row] = [
        {"kind": kind, **shape, "rate": rate, "seed": seed}
        for kind, (rate, seed) in zip(kinds, members, strict=True)
    ]
    diverged_rows = [row for row in rows if row["kind"] == "diverged"]
    rows = [row for row in rows if row["kind"] == "model"]
    run = run.select([m for m, kind in enumerate(kinds) if kind == "model"])
    _add_columns(rows, config, run, images)
    times.append(time.perf_counter())
    effect_rows = list(_effect_rows(config, images, run, rows))
    times.append(time.perf_counter())
    yield from (*rows, *diverged_rows, *effect_rows)
    stages = zip(("train", "total", "marginal"), pairwise(times), strict=True)
    seconds = {f"{stage}_seconds": end - start for stage, (start, end) in stages}
    yield {"kind": "time", **shape, **seconds}


def _add_columns(rows: list[Row], config: Config, run: Run, images: Images) -> None:
    """Add accuracies and ridge strengths to the rows of the networks of a run."""
    for columns in (_accuracy_columns(run, images), total_effects(config, run.last, images)):
        for row, added in zip(rows, columns, strict=True):
            row.update(added)


def _accuracy_columns(run: Run, images: Images) -> Iterator[Row]:
    """Numbers of epochs and accuracies of every member."""
    train = training.accuracies(run.last, images.train)
    test = training.accuracies(run.last, images.test)
    for m, epochs in enumerate(run.epochs.tolist()):
        yield {
            "epochs": epochs,
            "best_epochs": int(run.best_epoch[m]) + 1,
            "train_accuracy": train[m],
            "test_accuracy": test[m],
        }


def _effect_rows(config: Config, images: Images, run: Run, models: list[Row]) -> Iterator[Row]:
    """The marginal effect of dropout on networks of the first seeds, at best and at last weights.

    `models` are the rows of the networks of the run.
    """
    stages = ("best", run.best, config.best_seeds), ("last", run.last, config.last_seeds)
    for weights, ensemble, count in stages:
        seeds = config.seeds[:count]
        chosen = [m for m, row in enumerate(models) if row["rate"] > 0 and row["seed"] in seeds]
        rows = _group_rows(config, images, ensemble.select(chosen), [models[m] for m in chosen])
        yield from ({"kind": "effect", "weights": weights, **row} for row in rows)


def _group_rows(
    config: Config, images: Images, ensemble: Ensemble, models: Sequence[Row]
) -> Iterator[Row]:
    """The marginal effects on the networks of an ensemble, with their labels."""
    if not models:
        return
    labels = [{n: row[n] for n in ("depth", "width", "rate", "seed")} for row in models]
    rates, seeds = [row["rate"] for row in labels], [row["seed"] for row in labels]
    effects = marginal_effects(config, ensemble, images, rates, seeds)
    for label, effect in zip(labels, effects, strict=True):
        yield label | effect
