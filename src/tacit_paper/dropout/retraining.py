"""Networks of the dropout figure trained again with a penalty in place of dropout."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import Ensemble, Run
from tacit.objective.params import Params
from tacit.regularizers import l2
from tacit_paper import Row
from tacit_paper.dropout.columns import explicit_penalty
from tacit_paper.dropout.config import Config
from tacit_paper.dropout.estimates import marginal_effects, total_effects
from tacit_paper.dropout.training import (
    Images,
    accuracies,
    initial_ensemble,
    load_images,
    probabilities,
    tf32_products,
    training_plan,
)


def retrained_rows(config: Config, device: str) -> Iterator[Row]:
    """How close the predictions of penalised networks come to those of dropout networks.

    The networks are trained again from the same initial weights and through the same batches,
    without dropout: with explicit dropout, with ridge, and without a penalty.
    """
    images = load_images(config, device)
    (depth, width), rates = config.retrained, list(config.retrained_rates)
    seeds = [config.seeds[0]] * len(rates)
    initial = initial_ensemble(depth, width, images, seeds)
    with tf32_products():
        original = ensembles.train(
            initial, F.cross_entropy, images.train, training_plan(config, images),
            seeds=seeds, dropout=rates,
        )  # fmt: skip
    marginal = list(marginal_effects(config, original.best, images, rates, seeds))
    total = list(total_effects(config, original.last, images))
    zeros = [0.0] * len(rates)
    strengths = {
        "explicit": [row["explicit_dropout_strength"] for row in marginal],
        "ridge": [row["total_l2"] for row in total],
        "nothing": zeros,
    }
    reference = probabilities(original.last, images.test[0])
    dropout_accuracies = accuracies(original.last, images.test)
    for name in strengths:
        ensemble = _train_again(
            config, images, original, seeds,
            explicit=strengths[name] if name == "explicit" else zeros,
            ridge=strengths[name] if name == "ridge" else zeros,
        )  # fmt: skip
        predictions = probabilities(ensemble, images.test[0])
        distances = (predictions - reference).square().sum(-1).mean(1).sqrt().tolist()
        agreement = predictions.argmax(-1) == reference.argmax(-1)
        test_accuracies = accuracies(ensemble, images.test)
        for m, rate in enumerate(rates):
            yield {
                "kind": "retrained",
                "depth": depth,
                "width": width,
                "rate": rate,
                "seed": seeds[m],
                "penalty": name,
                "strength": strengths[name][m],
                "prediction_distance": distances[m],
                "agreement": float(agreement[m].double().mean()),
                "test_accuracy": test_accuracies[m],
                "dropout_accuracy": dropout_accuracies[m],
                "epochs": int(original.epochs[m]),
            }


def _train_again(
    config: Config,
    images: Images,
    original: Run,
    seeds: Sequence[int],
    *,
    explicit: list[float],
    ridge: list[float],
) -> Ensemble:
    """Networks trained without dropout for as many epochs as the original ones.

    Args:
        config: the settings.
        images: the images.
        original: the training with dropout.
        seeds: seeds of the original networks.
        explicit: strengths of the explicit dropout regularizer, one per network.
        ridge: strengths of ridge, one per network.
    """
    initial = initial_ensemble(*config.retrained, images, seeds)
    strengths = torch.tensor(explicit, device=images.train[0].device)

    def batch_penalty(params: Params, inputs: Tensor, _: Tensor, members: Tensor) -> Tensor:
        return strengths[members] * explicit_penalty(initial, params, inputs)

    with tf32_products():
        return ensembles.train(
            initial, F.cross_entropy, images.train,
            training_plan(config, images, original.epochs.tolist()),
            seeds=seeds, dropout=0.0, penalties={l2(): ridge},
            batch_penalty=batch_penalty if any(explicit) else None,
        ).last  # fmt: skip
