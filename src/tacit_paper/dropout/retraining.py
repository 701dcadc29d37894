"""Networks of the dropout figure trained again with a penalty in place of dropout."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.ensembles import Ensemble
from tacit.ensembles.training import BatchPenalty
from tacit.objective.params import Params
from tacit.regularizers import l2
from tacit_paper import Row
from tacit_paper.dropout import training
from tacit_paper.dropout.columns import explicit_penalty
from tacit_paper.dropout.config import Config
from tacit_paper.dropout.estimates import marginal_effects, total_effects


def retrained_rows(config: Config, device: str) -> Iterator[Row]:
    """How close the predictions of penalised networks come to those of dropout networks.

    The networks are trained again from the same initial weights and through the same batches,
    without dropout: with explicit dropout, with ridge, and without a penalty.
    """
    images = training.load_images(config, device)
    (depth, width), rates = config.retrained, list(config.retrained_rates)
    seeds = [config.seeds[0]] * len(rates)
    initial = training.initial_ensemble(depth, width, images, seeds)
    plan = training.training_plan(config, images)
    original = training.train(
        initial, F.cross_entropy, images.train, plan, seeds=seeds, dropout=rates
    )
    plan = training.training_plan(config, images, original.epochs.tolist())
    marginal = marginal_effects(config, original.best, images, rates, seeds)
    total = total_effects(config, original.last, images)
    zeros = [0.0] * len(rates)
    strengths = {
        "explicit": [row["explicit_dropout_strength"] for row in marginal],
        "ridge": [row["total_l2"] for row in total],
        "nothing": zeros,
    }
    reference = training.probabilities(original.last, images.test[0])
    dropout_accuracies = training.accuracies(original.last, images.test)
    for name in strengths:
        ensemble = training.train(
            initial, F.cross_entropy, images.train, plan, seeds=seeds, dropout=0.0,
            penalties={l2(): strengths[name] if name == "ridge" else zeros},
            batch_penalty=_explicit(initial, strengths[name]) if name == "explicit" else None,
        ).last  # fmt: skip
        predictions = training.probabilities(ensemble, images.test[0])
        distances = (predictions - reference).square().sum(-1).mean(1).sqrt().tolist()
        agreement = predictions.argmax(-1) == reference.argmax(-1)
        test_accuracies = training.accuracies(ensemble, images.test)
        for m, rate in enumerate(rates):
            network = {"depth": depth, "width": width, "rate": rate, "seed": seeds[m]}
            yield {
                "kind": "retrained",
                **network,
                "penalty": name,
                "strength": strengths[name][m],
                "prediction_distance": distances[m],
                "agreement": float(agreement[m].double().mean()),
                "test_accuracy": test_accuracies[m],
                "dropout_accuracy": dropout_accuracies[m],
                "epochs": int(original.epochs[m]),
            }


def _explicit(ensemble: Ensemble, strengths: list[float]) -> BatchPenalty:
    """The explicit dropout regularizer on a batch, with one strength per network."""
    factors = torch.tensor(strengths, device=ensemble.first_tensor.device)

    def batch_penalty(params: Params, inputs: Tensor, _: Tensor, members: Tensor) -> Tensor:
        return factors[members] * explicit_penalty(ensemble, params, inputs)

    return batch_penalty
