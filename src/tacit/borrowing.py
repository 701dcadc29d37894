"""Using a model without changing it: its tensors are swapped for a call, its state put back."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from tacit.losses import BatchMean, Measure
from tacit.params import Params


class Borrowed(nn.Module):
    """Lets a function use the user's own module while `functional_call` has swapped its tensors."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, measure: Measure, batch: Any, weights: Tensor | None) -> BatchMean:
        """Measure a batch; called through `evaluate`."""
        return measure(self.model, batch, weights)

    def evaluate(
        self, measure: Measure, params: Params, batch: Any, weights: Tensor | None
    ) -> BatchMean:
        """Measure a batch at given parameters, with copies of the buffers."""
        swapped = {f"model.{n}": p for n, p in params.items()}
        swapped |= {f"model.{n}": b.clone() for n, b in self.model.named_buffers()}
        return functional_call(self, swapped, (measure, batch, weights))


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the mode of every module (batch norm stays in eval), and put all back as it was found.

    `functional_call` puts back the buffers it swapped; those that a forward pass makes anew
    (caches that start as None) are taken out again here.
    """
    found = [(m, m.training, dict(m._buffers)) for m in model.modules()]
    recurrent = any(isinstance(module, nn.RNNBase) for module, _, _ in found)
    # cuDNN's recurrent layers have no backward in eval mode and no double backward at all.
    with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
        try:
            for module, _, _ in found:
                module.training = training and not isinstance(module, _BatchNorm)
            yield
        finally:
            for module, was, buffers in found:
                module.training = was
                module._buffers.clear()
                module._buffers.update(buffers)
