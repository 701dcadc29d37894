"""Networks of the `dropout` figure trained again without dropout: what stands in for it?"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit import ensembles
from tacit.ensembles import Ensemble, Run
from tacit.objective.params import Params
from tacit.regularizers import l2
from tacit_paper import Row
from tacit_paper.dropout_columns import explicit_penalty
from tacit_paper.dropout_estimates import marginal, total
from tacit_paper.dropout_training import (
    Config,
    Images,
    accuracy,
    fast_products,
    load,
    plan,
    probabilities,
    start,
)


def retrained(config: Config, device: str) -> Iterator[Row]:
    """Dropout networks again from the same start and batches, without dropout: what stands in?"""
    images = load(config, device)
    (depth, width), rates = config.retrained, list(config.retrained_rates)
    seeds = [config.seeds[0]] * len(rates)
    began = start(config, depth, width, images, seeds)
    with fast_products():
        original = ensembles.train(
            began, F.cross_entropy, images.train, plan(config, images),
            seeds=seeds, dropout=rates,
        )  # fmt: skip
    effect = list(marginal(config, original.best, images, rates, seeds))
    ridge = list(total(config, original.last, images))
    strengths = {
        "explicit": ([row["explicit_dropout_strength"] for row in effect], [0.0] * len(rates)),
        "ridge": ([0.0] * len(rates), [row["total_l2"] for row in ridge]),
        "nothing": ([0.0] * len(rates), [0.0] * len(rates)),
    }
    again = _train_again(config, images, original, strengths, seeds)
    reference = probabilities(original.last, images.test[0])
    own = accuracy(original.last, images.test)
    for name, ensemble in again.items():
        apart = probabilities(ensemble, images.test[0]) - reference
        distances = apart.square().sum(-1).mean(1).sqrt().tolist()
        agreement = probabilities(ensemble, images.test[0]).argmax(-1) == reference.argmax(-1)
        for m, (rate, accurate) in enumerate(
            zip(rates, accuracy(ensemble, images.test), strict=True)
        ):
            yield {
                "kind": "retrained",
                "depth": depth,
                "width": width,
                "rate": rate,
                "seed": seeds[m],
                "penalty": name,
                "strength": strengths[name][1 if name == "ridge" else 0][m],
                "prediction_distance": distances[m],
                "agreement": float(agreement[m].double().mean()),
                "test_accuracy": accurate,
                "dropout_accuracy": own[m],
                "epochs": int(original.epochs[m]),
            }


def _train_again(
    config: Config,
    images: Images,
    original: Run,
    strengths: dict[str, tuple[list[float], list[float]]],
    seeds: Sequence[int],
) -> dict[str, Ensemble]:
    """One training without dropout for every penalty, for as many epochs as the original had."""
    depth, width = config.retrained
    began = start(config, depth, width, images, seeds)
    found = {}
    for name, (explicit, ridge) in strengths.items():
        weights = torch.tensor(explicit, device=images.train[0].device)

        def added(
            params: Params, inputs: Tensor, _: Tensor, members: Tensor, own: Tensor = weights
        ) -> Tensor:
            return own[members] * explicit_penalty(began, params, inputs)

        with fast_products():
            found[name] = ensembles.train(
                began, F.cross_entropy, images.train,
                plan(config, images, original.epochs.tolist()),
                seeds=seeds, dropout=0.0, penalties={l2(): ridge},
                batch_penalty=added if any(explicit) else None,
            ).last  # fmt: skip
    return found
