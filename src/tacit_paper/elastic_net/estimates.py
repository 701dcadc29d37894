"""Estimates of both strengths: at the last weights, from epochs, as published, and polished."""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import product

from torch.nn import functional as F

from tacit import ensembles
from tacit.equations.endpoint import endpoint_equations
from tacit.fitting.fits import Fit, fit
from tacit.regularizers import l2, smooth_l1
from tacit.validation import penalty
from tacit.validation.minimising import minimise
from tacit.validation.penalised import PenalisedObjective
from tacit_paper import Row
from tacit_paper.elastic_net.config import Config
from tacit_paper.elastic_net.training import Member, Sweep
from tacit_paper.problem_kinds import join_kinds
from tacit_paper.published_fit import FitSettings, fit_as_published, gradient_products


def sweep_rows(config: Config, device: str, *, optimizer: str) -> Iterator[Row]:
    """Three rows per network of the sweep: `last`, `drift` and `published`; then one of times."""
    combinations = product(config.strengths, config.strengths, range(config.seeds))
    sweep = Sweep(config, [Member(*combination) for combination in combinations], device)
    regularizers = [smooth_l1(config.beta), l2()]
    before_training = time.perf_counter()
    run = sweep.train(regularizers, optimizer=optimizer)
    before_exact = time.perf_counter()
    data = sweep.data
    last = ensembles.fits(ensembles.endpoint_equations(run.last, F.mse_loss, data, regularizers))
    drift = ensembles.fits(ensembles.epoch_equations(run, F.mse_loss, data, regularizers))
    before_published = time.perf_counter()
    products = gradient_products(
        run.last, F.mse_loss, data, regularizers,
        batch_size=config.batch_size, shuffles=config.shuffles,
    )  # fmt: skip
    settings = FitSettings(config.fit_rate, config.fit_epochs, config.fit_patience)
    strengths, epochs, _ = fit_as_published(products, settings)
    end = time.perf_counter()
    for m, member in enumerate(sweep.members):
        network = {"optimizer": optimizer, "epochs": int(run.epochs[m]), **vars(member)}
        yield {**network, "estimate": "last", **_fit_columns(last[m])}
        yield {**network, "estimate": "drift", **_fit_columns(drift[m])}
        yield {
            **network, "estimate": "published", "fit_epochs": int(epochs[m]),
            **_published_columns(strengths[m].tolist(), last[m]),
        }  # fmt: skip
    yield {
        "estimate": "time",
        "optimizer": optimizer,
        "members": len(sweep.members),
        "train_seconds": before_exact - before_training,
        "exact_seconds": before_published - before_exact,
        "published_seconds": end - before_published,
    }


def _fit_columns(result: Fit) -> Row:
    """The columns that describe an exact fit: strengths, interval ends, diagnostics, problems."""
    l1_hat, l2_hat = result.strengths.values()
    intervals = result.intervals().get("training", {})
    interval_ends = {
        f"{name}_{end}": value
        for name, interval in zip(("l1", "l2"), intervals.values(), strict=False)
        for end, value in zip(("low", "high"), interval, strict=True)
    }
    return {
        "l1_hat": l1_hat,
        "l2_hat": l2_hat,
        "explained": result.explained,
        "residual_ratio": result.residual_ratio,
        "condition": result.condition,
        "gradient_norm": result.gradient_norm,
        **interval_ends,
        "problems": join_kinds(result.problems),
    }


def _published_columns(strengths: Sequence[float], exact: Fit) -> Row:
    """The published fit, and its relative distance from the exact solution of its equations."""
    distances = [
        abs(published - solution) / abs(solution) if solution else math.inf
        for published, solution in zip(strengths, exact.strengths.values(), strict=True)
    ]
    return {
        "l1_hat": strengths[0],
        "l2_hat": strengths[1],
        "l1_distance": distances[0],
        "l2_distance": distances[1],
        "problems": join_kinds(exact.problems),
    }


def polished_rows(config: Config, device: str, *, seeds: Sequence[int]) -> Iterator[Row]:
    """Networks of the polished cells, trained and then minimised further by L-BFGS.

    L-BFGS minimises the same penalised loss from the last weights of SGD. At its minimum the
    equations hold exactly, so both strengths must come back.
    """
    members = [Member(*cell, seed) for cell, seed in product(config.polished, seeds)]
    sweep = Sweep(config, members, device)
    regularizers = [smooth_l1(config.beta), l2()]
    run = sweep.train(regularizers)
    for m, member in enumerate(members):
        objective = sweep.objective(run.last, m)
        strengths = {"smooth_l1": member.l1, "l2": member.l2}
        start = time.perf_counter()
        penalised_loss = PenalisedObjective(objective, penalty(regularizers, strengths))
        minimum = minimise(penalised_loss, penalised_loss.flatten(objective.params))
        equations = endpoint_equations(
            objective, regularizers, params=penalised_loss.unflatten(minimum.theta)
        )
        yield {
            "estimate": "polished",
            "optimizer": "sgd",
            "epochs": int(run.epochs[m]),
            **vars(member),
            **_fit_columns(fit(equations)),
            "polish_seconds": time.perf_counter() - start,
        }
