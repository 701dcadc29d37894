"""Dropout by moments for all members of an ensemble: its column, and what it costs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import Objective
from tacit.ensembles import Ensemble
from tacit.ensembles.training import BatchPenalty
from tacit.objective.params import Params
from tacit.regularizers import Regularizer, dropout_moments, explicit_dropout
from tacit.regularizers.dropout import batch_penalty
from tacit_paper import Row
from tacit_paper.dropout.columns import known_regularizer
from tacit_paper.dropout.config import Config
from tacit_paper.dropout.training import Examples


def member_objective(ensemble: Ensemble, member: int, rate: float, data: Examples) -> Objective:
    """The objective of one member, whose dropout layers have its rate."""
    model = ensemble.module(member)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = rate
    return Objective(model, F.cross_entropy, data)


def moments_column(
    ensemble: Ensemble, data: Examples, rates: Sequence[float]
) -> dict[Regularizer, Params]:
    """The column of dropout by moments, one member after the other; its strength should be 1."""
    columns = []
    for m, rate in enumerate(rates):
        regularizer = dropout_moments(member_objective(ensemble, m, rate, data))
        columns.append(regularizer.gradient(ensemble.member(m))["dropout_moments"])
    stacked = {n: torch.stack([column[n] for column in columns]) for n in ensemble.params}
    return {known_regularizer("dropout_moments", stacked): stacked}


def moments_penalty(ensemble: Ensemble, rates: Tensor, examples: int) -> BatchPenalty:
    """Dropout by moments at the rate of each network, on the first examples of a batch."""
    penalty = batch_penalty(ensemble.model, F.cross_entropy)

    def evaluate(params: Params, inputs: Tensor, targets: Tensor, members: Tensor) -> Tensor:
        part = slice(examples)
        return penalty(params, inputs[:, part], targets[:, part], rates=rates[members]).mean(-1)

    return evaluate


def cost_columns(config: Config, ensemble: Ensemble, data: Examples, rate: float) -> Row:
    """Seconds of ∇L, and of the columns of explicit dropout and of dropout by moments.

    They are those of one network and the first examples.
    """
    pixels, labels = (tensor[: config.cost_examples] for tensor in data)
    objective = member_objective(ensemble, 0, rate, (pixels, labels))
    params = objective.params
    return {
        "examples": len(pixels),
        "gradient_seconds": _seconds(lambda: objective.gradient(params)),
        "explicit_dropout_seconds": _seconds(lambda: explicit_dropout(objective).gradient(params)),
        "dropout_moments_seconds": _seconds(lambda: dropout_moments(objective).gradient(params)),
    }


def _seconds(compute: Callable[[], Any]) -> float:
    """Time of the second call: the first also loads kernels."""
    compute()
    _wait_for_device()
    start = time.perf_counter()
    compute()
    _wait_for_device()
    return time.perf_counter() - start


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
