"""Networks trained again with a penalty in place of dropout."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from tacit.ensembles import Ensemble, Run
from tacit.ensembles.training import BatchPenalty
from tacit.objective.params import Params
from tacit.regularizers import l2
from tacit_paper import Row, dropout
from tacit_paper.dropout import training
from tacit_paper.dropout.columns import explicit_penalty
from tacit_paper.dropout.estimates import marginal_effects, total_effects
from tacit_paper.dropout.training import Images
from tacit_paper.dropout_moments.columns import moments_penalty
from tacit_paper.dropout_moments.config import Config

OTHER_SEED = 1000
"""What is added to seeds for other batches and masks."""


class DropoutNetworks(NamedTuple):
    """Networks trained with dropout at one rate, which the penalised ones are to imitate."""

    initial: Ensemble
    run: Run
    images: Images
    rate: float
    seeds: list[int]


def retrained_rows(config: Config, device: str, rate: float) -> Iterator[Row]:
    """How close the predictions of penalised networks come to those of dropout networks.

    The networks are trained again from the same initial weights and through the same batches,
    without dropout: by dropout by moments at its theory value 1; by explicit dropout at its theory
    value q/(1−q), and as estimated at the best weights (0 if that is negative); by the exact and
    the published ridge strength of the last weights; and without a penalty. Beside them are
    networks with dropout through other batches and masks, which no penalty can be closer than.
    """
    networks = _train_with_dropout(config, device, rate)
    images, count = networks.images, len(networks.seeds)
    marginal = marginal_effects(
        config.training, networks.run.best, images, [rate] * count, networks.seeds
    )
    total = list(total_effects(config.training, networks.run.last, images))
    estimated = [max(0.0, row["explicit_dropout_strength"]) for row in marginal]
    explicit = {"explicit": [rate / (1 - rate)] * count, "explicit, estimated": estimated}
    ridge = {
        "ridge": [row["total_l2"] for row in total],
        "published ridge": [row["published_l2"] for row in total],
        "nothing": [0.0] * count,
    }
    examples, like = config.retraining.penalty_examples, networks.initial.first_tensor
    factors = like.new_tensor([s for strengths in explicit.values() for s in strengths])
    second_order = _explicit(networks.initial, factors, examples)
    moments = moments_penalty(networks.initial, like.new_tensor([rate] * count), examples)
    yield from _arm_rows(config, networks, ridge, None)
    yield from _arm_rows(config, networks, explicit, second_order)
    yield from _arm_rows(config, networks, {"moments": [1.0] * count}, moments)
    yield from _arm_rows(config, networks, {"dropout again": [0.0] * count}, None, again=True)


def _train_with_dropout(config: Config, device: str, rate: float) -> DropoutNetworks:
    settings, images = config.retraining, training.load_images(config.training, device)
    images = images._replace(train=tuple(tensor[: settings.train] for tensor in images.train))
    shape = settings.networks
    seeds = list(config.training.seeds[: shape.seeds])
    initial = training.initial_ensemble(shape.depth, shape.width, images, seeds)
    plan = training.training_plan(_plan_settings(config), images)
    rates = [rate] * len(seeds)
    run = training.train(initial, F.cross_entropy, images.train, plan, seeds=seeds, dropout=rates)
    return DropoutNetworks(initial, run, images, rate, seeds)


def _plan_settings(config: Config) -> dropout.Config:
    """The paper's settings of training, with the batches of these networks."""
    return replace(config.training, batch_size=config.retraining.batch_size)


def _arm_rows(
    config: Config,
    networks: DropoutNetworks,
    arms: dict[str, list[float]],
    batch_penalty: BatchPenalty | None,
    *,
    again: bool = False,
) -> Iterator[Row]:
    """Rows of arms that are trained as one ensemble: every network once per arm.

    Args:
        config: the settings.
        networks: the networks with dropout.
        arms: one strength per network, for each arm.
        batch_penalty: the penalty of all arms, strengths included; None for ridge.
        again: whether the networks are trained with dropout, through other batches and masks.
    """
    copies, images = list(range(len(networks.seeds))) * len(arms), networks.images
    strengths = [strength for arm in arms.values() for strength in arm]
    epochs = [int(networks.run.epochs[m]) for m in copies]
    plan = training.training_plan(_plan_settings(config), images, epochs)
    start = time.perf_counter()
    run = training.train(
        networks.initial.select(copies), F.cross_entropy, images.train, plan,
        seeds=[networks.seeds[m] + OTHER_SEED * again for m in copies],
        dropout=networks.rate if again else 0.0,
        penalties={l2(): strengths} if batch_penalty is None else None,
        batch_penalty=batch_penalty,
    )  # fmt: skip
    seconds = (time.perf_counter() - start) / len(arms)
    comparisons = _compare(run.last, networks.run.last.select(copies), images)
    names = [name for name, arm in arms.items() for _ in arm]
    diverged = run.diverged.tolist()
    for row, m, name, strength, lost in zip(
        comparisons, copies, names, strengths, diverged, strict=True
    ):
        yield {
            "kind": "diverged" if lost else "retrained",
            "depth": config.retraining.networks.depth,
            "width": config.retraining.networks.width,
            "rate": networks.rate,
            "seed": networks.seeds[m],
            "penalty": name,
            "strength": strength,
            **row,
            "epochs": int(networks.run.epochs[m]),
            "train_seconds": seconds,
        }


def _compare(retrained: Ensemble, dropout: Ensemble, images: Images) -> Iterator[Row]:
    """Distances of predictions on the test images, and accuracies.

    The divergence is KL(dropout network ‖ retrained network), averaged over the images.
    """
    logs, expected = (
        training.log_probabilities(ensemble, images.test[0]) for ensemble in (retrained, dropout)
    )
    divergences = (expected.exp() * (expected - logs)).sum(-1).mean(1)
    distances = (logs.exp() - expected.exp()).square().sum(-1).mean(1).sqrt()
    agreements = (logs.argmax(-1) == expected.argmax(-1)).double().mean(1)
    accuracies = training.accuracies(retrained, images.test)
    dropout_accuracies = training.accuracies(dropout, images.test)
    for m in range(len(retrained)):
        yield {
            "divergence": float(divergences[m]),
            "prediction_distance": float(distances[m]),
            "agreement": float(agreements[m]),
            "test_accuracy": accuracies[m],
            "dropout_accuracy": dropout_accuracies[m],
        }


def _explicit(ensemble: Ensemble, strengths: Tensor, examples: int) -> BatchPenalty:
    """Explicit dropout on the first examples of a batch, with one strength per network."""

    def evaluate(params: Params, inputs: Tensor, _: Tensor, members: Tensor) -> Tensor:
        return strengths[members] * explicit_penalty(ensemble, params, inputs[:, :examples])

    return evaluate
