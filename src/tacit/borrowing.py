"""Using a model without changing it: its tensors are swapped for a call, its state put back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from tacit.params import Params

Found = TypeVar("Found")


class Borrowed(nn.Module):
    """Lets a function use the user's own module while `functional_call` has swapped its tensors."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        """Call the function on the model; reached through `at`."""
        return function(self.model)

    def at(self, params: Params, function: Callable[[nn.Module], Found]) -> Found:
        """What a function of the model gives at other parameters, with copies of the buffers.

        Trap: derivatives must be taken inside the function too. Activation checkpointing runs the
        model once more during backward, and must find the same parameters there.
        """
        swapped = {f"model.{n}": p for n, p in params.items()}
        swapped |= {f"model.{n}": b.clone() for n, b in self.model.named_buffers()}
        return functional_call(self, swapped, (function,))


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
