"""Estimates of both strengths: at the last weights, from epochs, as published, and polished."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

from torch.nn import functional as F

from tacit import Fit, Objective, Regularizer, endpoint_equations, fit
from tacit.ensembles import Run
from tacit.objective import Params
from tacit.validation import Certificate, certify, penalty
from tacit.validation.minimising import minimise
from tacit.validation.penalised import NoHessianError, PenalisedObjective
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
    published = published_columns(sweep, run, last)
    times.append(time.perf_counter())
    for m, member in enumerate(sweep.members):
        network = {"optimizer": optimizer, "epochs": int(run.epochs[m]), **vars(member)}
        yield {**network, "estimate": "last", **fit_columns(last[m])}
        yield {**network, "estimate": "drift", **fit_columns(drift[m])}
        yield {**network, "estimate": "published", **published[m]}
    stages = zip(("train", "exact", "published"), pairwise(times), strict=True)
    seconds = {f"{stage}_seconds": end - start for stage, (start, end) in stages}
    yield {"estimate": "time", "optimizer": optimizer, "members": len(sweep.members), **seconds}


def fit_columns(result: Fit) -> Row:
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


def published_columns(sweep: Sweep, run: Run, exact: Sequence[Fit]) -> list[Row]:
    """The published fit of every network, and its distance from the exact one.

    Both solve the same equations, at the last weights; the distance is relative to the exact
    solution.
    """
    config = sweep.config
    products = gradient_products(
        run.last, F.mse_loss, sweep.data, sweep.regularizers,
        batch_size=config.batch_size, shuffles=config.shuffles,
    )  # fmt: skip
    settings = FitSettings(config.fit_rate, config.fit_epochs, config.fit_patience)
    strengths, epochs, _ = fit_as_published(products, settings)
    rows = []
    for (l1_hat, l2_hat), count, solution in zip(strengths.tolist(), epochs, exact, strict=True):
        l1_exact, l2_exact = solution.strengths.values()
        rows.append(
            {
                "fit_epochs": int(count),
                "l1_hat": l1_hat,
                "l2_hat": l2_hat,
                "l1_distance": _relative_distance(l1_hat, l1_exact),
                "l2_distance": _relative_distance(l2_hat, l2_exact),
                "problems": join_kinds(solution.problems),
            }
        )
    return rows


def _relative_distance(value: float, exact: float) -> float:
    return abs(value - exact) / abs(exact) if exact else math.inf


def polished_rows(config: Config, device: str, *, seeds: Sequence[int]) -> Iterator[Row]:
    """Networks of the polished cells, trained and then minimised further by L-BFGS.

    L-BFGS minimises the same penalised loss from the last weights of SGD. At its minimum the
    equations hold exactly, so both strengths must come back. The certificate says whether that
    minimum has positive curvature in all directions, with the true strengths.
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
        polish_seconds = time.perf_counter() - start
        yield {
            "estimate": "polished",
            "optimizer": "sgd",
            "epochs": int(run.epochs[m]),
            **vars(member),
            **fit_columns(fit(equations)),
            **_certificate_columns(objective, sweep.regularizers, strengths, params),
            "polish_seconds": polish_seconds,
        }


def certificate_columns(certificate: Certificate | None) -> Row:
    """What a certificate says; an empty verdict where there is none."""
    if certificate is None:
        return {"verdict": ""}
    return {"verdict": certificate.verdict, "curvature": certificate.smallest_eigenvalue}


def _certificate_columns(
    objective: Objective,
    regularizers: Sequence[Regularizer],
    strengths: Mapping[str, float],
    params: Params,
) -> Row:
    try:
        return certificate_columns(certify(objective, regularizers, strengths, params=params))
    except NoHessianError:
        return certificate_columns(None)
