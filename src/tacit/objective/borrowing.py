"""Using a model without changing it: parameters are swapped for a call, all state is restored."""

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

Value = TypeVar("Value")


def call_with_params(
    model: nn.Module, params: Params, function: Callable[[nn.Module], Value]
) -> Value:
    """The value of function(model) with other parameters, and with copies of the buffers.

    Trap: take derivatives inside the function too. Activation checkpointing runs the model a
    second time during backward, and that run must see the same parameters.
    """
    swapped = {f"model.{n}": p for n, p in params.items()}
    swapped |= {f"model.{n}": b.clone() for n, b in model.named_buffers()}
    return functional_call(_Caller(model), swapped, (function,))


class _Caller(nn.Module):
    """A module whose forward hands the user's model to a function.

    `functional_call` swaps parameters only during a module's forward.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        """Call the function on the model."""
        return function(self.model)


@contextmanager
def temporary_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the mode of every module (batch norm stays in eval), and restore modes and buffers.

    `functional_call` restores the buffers that it swapped; buffers that a forward pass adds
    (caches that start as None) are removed here.
    """
    states = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    recurrent = any(isinstance(module, nn.RNNBase) for module, _, _ in states)
    # cuDNN's recurrent layers have no backward in eval mode and no double backward at all.
    with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
        try:
            for module, _, _ in states:
                module.training = training and not isinstance(module, _BatchNorm)
            yield
        finally:
            for module, was_training, buffers in states:
                module.training = was_training
                module._buffers.clear()
                module._buffers.update(buffers)


@contextmanager
def restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Restore the model's weights, buffers, gradients and modes at the end.

    Yields a function that restores them at any time, for several trainings in a row.
    """
    parameters = list(model.parameters())
    tensors = [*parameters, *model.buffers()]
    values = [t.detach().clone() for t in tensors]
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        for module, training in modes:
            module.training = training

    try:
        yield restore
    finally:
        restore()


@contextmanager
def forked_randomness(
    devices: set[torch.device], generators: tuple[torch.Generator, ...] = ()
) -> Iterator[None]:
    """Restore the random states of torch, numpy, Python and the given generators at the end."""
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
        np.random.set_state(numpy)  # noqa: NPY002 # the global state
