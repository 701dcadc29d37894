"""Estimates of both strengths: at the last weights, from epochs, as published, and polished."""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from torch.nn import functional as F

from tacit import Fit, endpoint_equations, fit
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
    times = [time.perf_counter()]
    run = sweep.train(optimizer)
    times.append(time.perf_counter())
    last, drift = sweep.fits(run)
    times.append(time.perf_counter())
    products = gradient_products(
        run.last, F.mse_loss, sweep.data, sweep.regularizers,
        batch_size=config.batch_size, shuffles=config.shuffles,
    )  # fmt: skip
    settings = FitSettings(config.fit_rate, config.fit_epochs, config.fit_patience)
    strengths, epochs, _ = fit_as_published(products, settings)
    times.append(time.perf_counter())
    for m, member in enumerate(sweep.members):
        network = {"optimizer": optimizer, "epochs": int(run.epochs[m]), **vars(member)}
        yield {**network, "estimate": "last", **_fit_columns(last[m])}
        yield {**network, "estimate": "drift", **_fit_columns(drift[m])}
        published = _published_columns(strengths[m].tolist(), last[m])
        yield {**network, "estimate": "published", "fit_epochs": int(epochs[m]), **published}
    stages = zip(("train", "exact", "published"), pairwise(times), strict=True)
    seconds = {f"{stage}_seconds": end - start for stage, (start, end) in stages}
    yield {"estimate": "time", "optimizer": optimizer, "members": len(sweep.members), **seconds}


def _fit_columns(result: Fit) -> Row:
    """The columns that describe an exact fit: strengths, interval ends, diagnostics, problems."""
    l1_hat, l2_hat = result.strengths.values()
    columns = {
        "l1_hat": l1_hat,
        "l2_hat": l2_hat,
        "explained": result.explained,
        "residual_ratio": result.residual_ratio,
        "condition": result.condition,
        "gradient_norm": result.gradient_norm,
    }
    intervals = result.intervals().get("training", {})
    for name, (low, high) in zip(("l1", "l2"), intervals.values(), strict=False):
        columns |= {f"{name}_low": low, f"{name}_high": high}
    return {**columns, "problems": join_kinds(result.problems)}


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
    run = sweep.train()
    for m, member in enumerate(members):
        objective = sweep.objective(run.last, m)
        strengths = {"smooth_l1": member.l1, "l2": member.l2}
        start = time.perf_counter()
        penalised_loss = PenalisedObjective(objective, penalty(sweep.regularizers, strengths))
        theta, _ = minimise(penalised_loss, penalised_loss.flatten(objective.params))
        params = penalised_loss.unflatten(theta)
        equations = endpoint_equations(objective, sweep.regularizers, params=params)
        yield {
            "estimate": "polished",
            "optimizer": "sgd",
            "epochs": int(run.epochs[m]),
            **vars(member),
            **_fit_columns(fit(equations)),
            "polish_seconds": time.perf_counter() - start,
        }
