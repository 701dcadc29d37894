"""One pass for what is no mean of losses: predictions, and a function of every batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tacit.errors import InputError
from tacit.objective.batches import BatchPair
from tacit.objective.losses import Loss, split_batch
from tacit.objective.params import Params
from tacit.objective.passes import Passes
from tacit.objective.ranks import check_alone

Visit = Callable[[nn.Module, Any, Tensor | None, int], None]
"""visit(model, batch, weights, index), with the parameters swapped in."""


def predict(
    passes: Passes, loss: Loss | None, points: Sequence[Params]
) -> tuple[list[Tensor], Any]:
    """See `Objective.predictions`."""
    check_alone(passes.ranks, "what is no mean of losses, as predictions and activations,")
    outputs: list[list[Tensor]] = [[] for _ in points]
    target = None
    # With gradients, because some models differentiate in themselves (forces from energies).
    with passes.prepared(training=False), torch.enable_grad():
        for batch, _ in passes.read():
            for params, outputs_here in zip(points, outputs, strict=True):
                output = None
                if loss is not None:
                    inputs, target = split_batch(batch)
                    output = passes.call(params, lambda model, _, i=inputs: model(*i))
                if not isinstance(output, Tensor):
                    raise InputError(
                        "predictions need one tensor model(*inputs), and a loss(output, "
                        "target). Pass outputs=, a function from parameters to predictions."
                    )
                outputs_here.append(output.detach())
    return [torch.cat(batch_outputs) for batch_outputs in outputs], target


def visit(
    passes: Passes, params: Params, use: Visit, probe: BatchPair | None, *, drawn: bool
) -> None:
    """See `Objective.for_each_batch`; `drawn` says that each draw has other examples."""
    check_alone(passes.ranks, "what is no mean of losses, as predictions and activations,")
    if drawn and probe is None:
        raise InputError(
            f"the data is drawn anew for each of {passes.draws} draws, and what is computed "
            "here needs one reading of it: pass an objective of the data without augmentation."
        )
    with passes.prepared(training=False), torch.enable_grad():
        pairs = passes.read() if probe is None else [passes.to_model(probe)]
        for index, (batch, weights) in enumerate(pairs):
            passes.call(params, lambda model, _, b=batch, w=weights, i=index: use(model, b, w, i))
