"""A loss on a few examples of the probe, for comparisons that must stay cheap beside training."""

from typing import Any

import torch

from tacit.objective.batches import BatchPair, row_count, select_rows, tensors_in
from tacit.objective.losses import ExampleLosses, MeanLoss
from tacit.objective.params import Params
from tacit.objective.parts import PART_ERRORS
from tacit.objective.passes import Passes

TARGETS, FEWEST = 64, 2
"""About how many targets (labels, tokens, pixels) are enough, and the fewest examples."""


def loss_of_few(passes: Passes, params: Params, probe: BatchPair) -> float:
    """See `Objective.loss_of_few`."""
    batch, weights = probe = passes.to_model(probe)
    with passes.prepared(training=passes.training) as passes, torch.enable_grad():
        if weights is None and isinstance(passes.loss, ExampleLosses | MeanLoss):
            try:
                return float(passes.batch_mean(params, (_few_rows(batch), None), 0).mean)
            except PART_ERRORS:  # the loss does not take a part of a batch
                pass
        return float(passes.batch_mean(params, probe, 0).mean)


def _few_rows(batch: Any) -> Any:
    """A few examples, spread over the batch; all of it where it does not show how many it has."""
    count = row_count(batch)
    *_, last = (t for t in (torch.zeros(1), *tensors_in(batch)) if t.ndim and t.numel())
    most = max(FEWEST, TARGETS * len(last) // last.numel())
    if count is None or count <= most:
        return batch
    return select_rows(batch, torch.linspace(0, count - 1, most).long(), count)
