"""How precisely a gradient is known: its change when every weight moves by its last digit."""

import math

import torch
from torch import Tensor

from tacit.objective import derivatives
from tacit.objective.batches import BatchPair, row_count
from tacit.objective.losses import ExampleLosses
from tacit.objective.params import Params, coarsest_dtype, perturb_last_digit, square_norms
from tacit.objective.parts import PART_ERRORS, spread_rows
from tacit.objective.passes import Passes

MAX_SAMPLE = 2**20
"""About how many entries of a tensor are compared to measure the rounding of its gradient."""


def measure_rounding(passes: Passes, params: Params, probe: BatchPair) -> dict[str, float]:
    """See `Objective.rounding`."""
    pair = passes.to_model(probe)
    with passes.prepared(training=passes.training) as passes, torch.enable_grad():
        try:
            here, dtypes = _sampled_gradient(passes, params, few := _few_examples(passes, pair))
            pair = few
        except PART_ERRORS:  # the loss does not take a part of a batch
            here, dtypes = _sampled_gradient(passes, params, pair)
        dtype = coarsest_dtype(*params.values(), others=(*dtypes, passes.sums))
        moved = perturb_last_digit(params, torch.finfo(dtype).eps)
        there, _ = _sampled_gradient(passes, moved, pair)
    names = [name for name in here if name in there]
    differences = torch._foreach_sub(  # pyright: ignore[reportPrivateImportUsage]
        [here[name] for name in names], [there[name] for name in names]
    )
    changes = square_norms(dict(zip(names, differences, strict=True)))
    sizes = {n: params[n].numel() / max(here[n].numel(), 1) for n in changes}
    return {n: math.sqrt(changes.get(n, 0.0) * sizes.get(n, 1.0)) for n in params}


def _few_examples(passes: Passes, pair: BatchPair) -> BatchPair:
    """A few examples of a whole batch; other readers have chosen a few already."""
    batch, weights = pair
    if weights is not None or not isinstance(passes.loss, ExampleLosses):
        return pair
    return spread_rows(batch, row_count(batch)), None


def _sampled_gradient(
    passes: Passes, params: Params, pair: BatchPair
) -> tuple[Params, set[torch.dtype]]:
    """The gradient on a batch, at entries that are spread over each tensor; of small ones all.

    Also the dtypes of the operations that the loss is computed by.
    """
    entries: Params = {}
    dtypes: set[torch.dtype] = set()

    def use(gradients: Params) -> None:
        for name, gradient in gradients.items():
            step = gradient.numel() // MAX_SAMPLE
            # An odd step does not stay in a few columns of a matrix.
            entries[name] = gradient if step < 2 else gradient.flatten()[:: step | 1].clone()

    def derivative(mean: Tensor, leaves: Params) -> tuple[()]:
        dtypes.update(derivatives.graph_dtypes(mean))
        derivatives.stream_gradient(mean, leaves, use)
        return ()

    passes.differentiate(params, pair, derivative, 0, 0)
    return entries, dtypes
