"""Dropout by moments for all members of an ensemble: its column, and what a column costs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.ensembles import Ensemble
from tacit.ensembles.data import assign_data
from tacit.ensembles.evaluation import differentiate, mean_gradients
from tacit.ensembles.training import BatchPenalty
from tacit.objective.params import Params, float64_zeros
from tacit.regularizers import Regularizer
from tacit.regularizers.dropout import batch_penalty
from tacit_paper import Row
from tacit_paper.dropout.columns import explicit_column, known_regularizer
from tacit_paper.dropout.training import Examples

ENTRIES = {"cpu": 2**20, "cuda": 2**28}
"""Most entries of the covariances of one layer, of all members and examples at a time, by device.
A GPU is idle most of the time if there are few: a step is hundreds of operations."""
COPIES = 16
"""Tensors of that size that the forward and backward pass hold for each linear layer."""


def moments_column(
    ensemble: Ensemble, data: Examples, rates: Sequence[float]
) -> dict[Regularizer, Params]:
    """The column of `tacit.regularizers.dropout_moments` of every member at its rate.

    The rates are in it: its strength should be 1.
    """
    like, sums = ensemble.first_tensor, float64_zeros(ensemble.params)
    member_data = assign_data(data, len(ensemble), like)
    member_rates = like.new_tensor(rates)
    penalty = batch_penalty(ensemble.model, F.cross_entropy)
    for inputs, targets in member_data.slices(_examples_at_once(ensemble)):

        def total(params: Params, inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            return penalty(params, inputs, targets, rates=member_rates).sum(-1)

        for name, gradient in differentiate(total, ensemble.params).gradients.items():
            sums[name].add_(gradient, alpha=1 / member_data.examples)
    return {known_regularizer("dropout_moments", sums): sums}


def _examples_at_once(ensemble: Ensemble) -> int:
    """Number of examples of every member whose covariances fit into `ENTRIES` and into memory."""
    device, itemsize = ensemble.first_tensor.device, ensemble.first_tensor.element_size()
    entries = ENTRIES[device.type]
    if device.type == "cuda":
        layers = len(ensemble.params) // 2
        free, _ = torch.cuda.mem_get_info(device)
        entries = min(entries, free // (itemsize * COPIES * layers))
    widest = max(p.shape[1] for p in ensemble.params.values())
    return max(1, entries // (widest**2 * len(ensemble)))


def moments_penalty(ensemble: Ensemble, rates: Tensor, examples: int) -> BatchPenalty:
    """Dropout by moments at the rate of each network, on the first examples of a batch.

    Weights that are no longer finite count as zero: their network's loss is NaN anyway, and the
    factorisation of NaN would stop all networks.
    """
    penalty = batch_penalty(ensemble.model, F.cross_entropy)

    def evaluate(params: Params, inputs: Tensor, targets: Tensor, members: Tensor) -> Tensor:
        part, params = slice(examples), {n: p.nan_to_num(0, 0, 0) for n, p in params.items()}
        return penalty(params, inputs[:, part], targets[:, part], rates=rates[members]).mean(-1)

    return evaluate


def cost_columns(count: int, ensemble: Ensemble, data: Examples, rate: float) -> Row:
    """Seconds of ∇L, and of the columns of explicit dropout and of dropout by moments.

    They are those of one network and the first `count` examples.
    """
    network = ensemble.select([0])
    pixels, labels = (tensor[:count] for tensor in data)
    examples = assign_data((pixels, labels), 1, network.first_tensor)
    return {
        "examples": len(pixels),
        "gradient_seconds": _seconds(lambda: mean_gradients(network, F.cross_entropy, examples)),
        "explicit_dropout_seconds": _seconds(lambda: explicit_column(network, examples)),
        "dropout_moments_seconds": _seconds(
            lambda: moments_column(network, (pixels, labels), [rate])
        ),
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
