"""Using a model without changing it: its tensors are swapped for a call, its state put back."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from tacit.objective.params import Params

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


@contextmanager
def forked_randomness(
    devices: set[torch.device], generators: tuple[torch.Generator, ...] = ()
) -> Iterator[None]:
    """Leave the random states of torch, numpy, Python and given generators as they were found."""
    states = [generator.get_state() for generator in generators]
    cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 # the global state
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 # the same
