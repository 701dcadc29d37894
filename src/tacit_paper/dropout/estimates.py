"""Estimates of the dropout figure: a ridge strength, and what dropout adds to the gradient."""

import time
from collections.abc import Iterator
from itertools import pairwise, product

from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import Ensemble, Run
from tacit.equations.equations import Equations
from tacit.fitting.fits import fit
from tacit.regularizers import l2, layerwise
from tacit_paper import Row
from tacit_paper.dropout import training
from tacit_paper.dropout.columns import dropout_columns
from tacit_paper.dropout.config import Config
from tacit_paper.dropout.training import Images
from tacit_paper.problem_kinds import join_kinds
from tacit_paper.published_fit import FitSettings, fit_as_published, gradient_products


def architecture_rows(config: Config, device: str, depth: int, width: int) -> Iterator[Row]:
    """All rates and seeds of one architecture: networks, marginal effects, and one row of times."""
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
    for columns in (_accuracy_columns(run, images), total_effects(config, run.last, images)):
        for row, added in zip(rows, columns, strict=True):
            row.update(added)
    times.append(time.perf_counter())
    effect_rows = list(_effect_rows(config, images, run, rows))
    times.append(time.perf_counter())
    yield from (*rows, *diverged_rows, *effect_rows)
    stages = zip(("train", "total", "marginal"), pairwise(times), strict=True)
    seconds = {f"{stage}_seconds": end - start for stage, (start, end) in stages}
    yield {"kind": "time", **shape, **seconds}


def _effect_rows(config: Config, images: Images, run: Run, models: list[Row]) -> Iterator[Row]:
    """The marginal effect of dropout on networks of the first seeds, at best and at last weights.

    `models` are the rows of the networks of the run.
    """
    stages = ("best", run.best, config.best_seeds), ("last", run.last, config.last_seeds)
    for weights, ensemble, count in stages:
        seeds = config.seeds[:count]
        chosen = [m for m, row in enumerate(models) if row["rate"] > 0 and row["seed"] in seeds]
        names = ("depth", "width", "rate", "seed")
        labels = [{name: models[m][name] for name in names} for m in chosen]
        rates, seeds = [row["rate"] for row in labels], [row["seed"] for row in labels]
        effects = marginal_effects(config, ensemble.select(chosen), images, rates, seeds)
        for label, effect in zip(labels, effects, strict=True):
            yield {"kind": "effect", "weights": weights, **label, **effect}


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


def total_effects(config: Config, ensemble: Ensemble, images: Images) -> Iterator[Row]:
    """The ridge strength of every member, exactly and by the published fit."""
    problem = (ensemble, F.cross_entropy, images.train, [l2()])
    exact_fits = ensembles.fits(ensembles.endpoint_equations(*problem))
    products = gradient_products(*problem, batch_size=config.batch_size, shuffles=config.shuffles)
    settings = FitSettings(
        config.fit_rate, config.fit_epochs, config.fit_patience, config.fit_plateau
    )
    published = fit_as_published(products, settings)
    for m, exact in enumerate(exact_fits):
        yield {
            "total_l2": exact.strengths["l2"],
            "total_explained": exact.explained,
            "total_problems": join_kinds(exact.problems),
            "gradient_norm": exact.gradient_norm,
            "published_l2": float(published.strengths[m, 0]),
            "published_epochs": int(published.epochs[m]),
            "published_loss": float(published.losses[m]),
        }


def marginal_effects(
    config: Config, ensemble: Ensemble, images: Images, rates: list[float], seeds: list[int]
) -> Iterator[Row]:
    """What dropout adds to the gradient of every member, and how well each family explains it.

    Args:
        config: the settings.
        ensemble: the networks.
        images: the images.
        rates: one dropout rate per member.
        seeds: one seed per member, for its masks.
    """
    columns = dropout_columns(ensemble, images.train)
    marginal = ensembles.dropout_equations(
        ensemble, F.cross_entropy, images.train, [l2(), layerwise(l2()), *columns],
        dropout=rates, seeds=seeds, noise=config.noise, columns=columns,
    )  # fmt: skip
    for m, equations in enumerate(marginal.equations):
        yield {
            "theory": rates[m] / (1 - rates[m]),
            "draws": marginal.draws[m],
            "noise": marginal.noise[m],
            **_family_columns(equations),
        }


def _family_columns(equations: Equations) -> Row:
    """Strength, explained fraction and problems of each family when it is the only candidate."""
    row: Row = {}
    for name in ("l2", "weighted_l2", "explicit_dropout"):
        family_fit = fit(equations.select_columns([equations.names.index(name)]))
        row[f"{name}_strength"] = family_fit.strengths[name]
        row[f"{name}_explained"] = family_fit.explained
        row[f"{name}_problems"] = join_kinds(family_fit.problems)
    for name in ("l2", "weighted_l2"):
        layers = [i for i, column in enumerate(equations.names) if column.startswith(f"{name}[")]
        row[f"layerwise_{name}_explained"] = fit(equations.select_columns(layers)).explained
    return row
