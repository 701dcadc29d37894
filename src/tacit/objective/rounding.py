"""How precisely a gradient is known: its change when every weight moves by its last digit."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tacit.objective import derivatives
from tacit.objective.batches import BatchPair, row_count
from tacit.objective.losses import ExampleLosses, check_finite_loss
from tacit.objective.params import (
    Params,
    coarsest_dtype,
    norms_on_device,
    perturb_last_digit,
    read_square_norms,
)
from tacit.objective.parts import PART_ERRORS, spread_rows
from tacit.objective.passes import Passes

MAX_SAMPLE = 2**20
"""About how many entries of a tensor are compared to measure the rounding of its gradient."""
FEWEST = 2
"""Of long sequences so many are enough."""


def begin_rounding(
    passes: Passes, params: Params, probe: BatchPair
) -> Callable[[], dict[str, float]]:
    """See `Objective.begin_rounding`."""
    pair = passes.to_model(probe)
    try:
        return _begin(passes, params, _few_examples(passes, pair))
    except PART_ERRORS:  # the loss does not take a part of a batch
        return _begin(passes, params, pair)


@torch.inference_mode(mode=False)
def _begin(passes: Passes, params: Params, pair: BatchPair) -> Callable[[], dict[str, float]]:
    """The computation on a batch, and a function that reads its result."""
    with passes.prepared(training=passes.training) as prepared, torch.enable_grad():
        dtypes = {passes.sums}
        here, mean = _sampled_gradient(prepared, params, pair, dtypes)
        dtype = coarsest_dtype(*params.values(), others=dtypes)
        moved = perturb_last_digit(params, torch.finfo(dtype).eps)
        there, _ = _sampled_gradient(prepared, moved, pair)
    names = [name for name in here if name in there]
    differences = torch._foreach_sub(  # pyright: ignore[reportPrivateImportUsage]
        [here[name] for name in names], [there[name] for name in names]
    )
    norms = norms_on_device(dict(zip(names, differences, strict=True)))
    parts = {name: params[name].numel() / max(here[name].numel(), 1) for name in names}

    def read() -> dict[str, float]:
        check_finite_loss(float(mean), 0)
        squares = read_square_norms(norms, params)
        return {name: math.sqrt(squares[name] * parts.get(name, 1.0)) for name in params}

    return read


def _few_examples(passes: Passes, pair: BatchPair) -> BatchPair:
    """A few examples of a whole batch; other readers have chosen a few already."""
    batch, weights = pair
    if weights is not None or not isinstance(passes.loss, ExampleLosses):
        return pair
    return spread_rows(batch, row_count(batch), FEWEST), None


def _sampled_gradient(
    passes: Passes, params: Params, pair: BatchPair, dtypes: set[torch.dtype] | None = None
) -> tuple[Params, Tensor]:
    """The gradient on a batch, at entries that are spread over each tensor; of small ones all.

    Also the mean loss. To `dtypes` those of the operations are added that it is computed by.
    """
    entries: Params = {}

    def use(gradients: Params) -> None:
        for name, gradient in gradients.items():
            step = gradient.numel() // MAX_SAMPLE
            # An odd step does not stay in a few columns of a matrix.
            entries[name] = gradient if step < 2 else gradient.flatten()[:: step | 1].clone()

    def derivative(mean: Tensor, leaves: Params) -> tuple[()]:
        if dtypes is not None:
            dtypes.update(derivatives.graph_dtypes(mean))
        derivatives.stream_gradient(mean, leaves, use)
        return ()

    batch_mean, _ = passes.differentiate(params, pair, derivative, 0, 0)
    return entries, batch_mean.mean
