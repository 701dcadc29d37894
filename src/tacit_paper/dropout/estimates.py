"""Estimates of the dropout figure: a ridge strength, and what dropout adds to the gradient."""

import time
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise, product

from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import Ensemble, Run
from tacit.equations.equations import Equations
from tacit.fitting.fits import fit
from tacit.regularizers import l2, layerwise
from tacit_paper import Row
from tacit_paper.dropout.columns import dropout_columns
from tacit_paper.dropout.config import Config
from tacit_paper.dropout.training import (
    Images,
    accuracies,
    initial_ensemble,
    load_images,
    tf32_products,
    training_plan,
)
from tacit_paper.problem_kinds import join_kinds
from tacit_paper.published_fit import FitSettings, fit_as_published, gradient_products


def architecture_rows(config: Config, device: str, *, depth: int, width: int) -> Iterator[Row]:
    """All rates and seeds of one architecture: networks, marginal effects, and one row of times."""
    images = load_images(config, device)
    members = list(product(config.rates, config.seeds))
    rates, seeds = [rate for rate, _ in members], [seed for _, seed in members]
    times = [time.perf_counter()]
    with tf32_products():
        run = ensembles.train(
            initial_ensemble(depth, width, images, seeds), F.cross_entropy, images.train,
            training_plan(config, images), seeds=seeds, dropout=rates,
        )  # fmt: skip
    times.append(time.perf_counter())
    rows: list[Row] = [
        {"kind": "model", "depth": depth, "width": width, "rate": rate, "seed": seed}
        for rate, seed in members
    ]
    diverged = run.diverged.tolist()
    diverged_rows = [
        {**row, "kind": "diverged"} for row, lost in zip(rows, diverged, strict=True) if lost
    ]
    trained = [m for m, lost in enumerate(diverged) if not lost]
    run, rows = run.select(trained), [rows[m] for m in trained]
    for columns in (_accuracy_columns(run, images), total_effects(config, run.last, images)):
        for row, added in zip(rows, columns, strict=True):
            row.update(added)
    times.append(time.perf_counter())
    best_seeds, last_seeds = config.seeds[: config.best_seeds], config.seeds[: config.last_seeds]
    effect_rows = [
        *_effect_rows(config, images, run.best, rows, "best", best_seeds),
        *_effect_rows(config, images, run.last, rows, "last", last_seeds),
    ]
    times.append(time.perf_counter())
    yield from (*rows, *diverged_rows, *effect_rows)
    stages = zip(("train", "total", "marginal"), pairwise(times), strict=True)
    yield {
        "kind": "time",
        "depth": depth,
        "width": width,
        **{f"{stage}_seconds": end - start for stage, (start, end) in stages},
    }


def _effect_rows(
    config: Config,
    images: Images,
    ensemble: Ensemble,
    models: list[Row],
    weights: str,
    seeds: Collection[int],
) -> Iterator[Row]:
    """One row per network of these seeds that was trained with dropout: its marginal effect.

    Args:
        config: the settings.
        images: the images.
        ensemble: the networks, one per row of `models`.
        models: rows of the trained networks.
        weights: which weights the ensemble holds, `best` or `last`.
        seeds: the seeds of the networks to include.
    """
    chosen = [m for m, row in enumerate(models) if row["rate"] > 0 and row["seed"] in seeds]
    chosen_models = [models[m] for m in chosen]
    effects = marginal_effects(
        config, ensemble.select(chosen), images,
        [row["rate"] for row in chosen_models], [row["seed"] for row in chosen_models],
    )  # fmt: skip
    for row, effect in zip(chosen_models, effects, strict=True):
        model = {name: row[name] for name in ("depth", "width", "rate", "seed")}
        yield {"kind": "effect", "weights": weights, **model, **effect}


def _accuracy_columns(run: Run, images: Images) -> Iterator[Row]:
    """Numbers of epochs and accuracies of every member."""
    train, test = (accuracies(run.last, examples) for examples in (images.train, images.test))
    for m, epochs in enumerate(run.epochs.tolist()):
        yield {
            "epochs": epochs,
            "best_epochs": int(run.best_epoch[m]) + 1,
            "train_accuracy": train[m],
            "test_accuracy": test[m],
        }


def total_effects(config: Config, ensemble: Ensemble, images: Images) -> Iterator[Row]:
    """The ridge strength of every member, exactly and by the published fit."""
    ridge = [l2()]
    exact_fits = ensembles.fits(
        ensembles.endpoint_equations(ensemble, F.cross_entropy, images.train, ridge)
    )
    products = gradient_products(
        ensemble, F.cross_entropy, images.train, ridge,
        batch_size=config.batch_size, shuffles=config.shuffles,
    )  # fmt: skip
    published = fit_as_published(
        products,
        FitSettings(config.fit_rate, config.fit_epochs, config.fit_patience, config.fit_plateau),
    )
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
    config: Config,
    ensemble: Ensemble,
    images: Images,
    rates: Sequence[float],
    seeds: Sequence[int],
) -> Iterator[Row]:
    """What dropout adds to the gradient of every member, and how well each family explains it.

    Args:
        config: the settings.
        ensemble: the networks.
        images: the images.
        rates: one dropout rate per member.
        seeds: one seed per member, for its masks.
    """
    known = dropout_columns(ensemble, images.train)
    candidates = [l2(), layerwise(l2()), *known.regularizers]
    marginal = ensembles.dropout_equations(
        ensemble, F.cross_entropy, images.train, candidates,
        dropout=rates, seeds=seeds, noise=config.noise, columns=known.columns,
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
