"""Using a model without changing it: parameters are swapped for a call, all state is restored."""

import operator
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tacit.errors import InputError
from tacit.objective.models import (
    BatchNorm,
    is_batch_norm,
    named_buffers,
    named_parameters,
    walk_modules,
)
from tacit.objective.params import Params, Point
from tacit.objective.randomness import Generator
from tacit.objective.ranks import is_sharded
from tacit.objective.sharding import Shard, find_shards, gathered_when_read

Value = TypeVar("Value")
CONTAINERS = (list, dict, OrderedDict, defaultdict)
LONG = 2**12
"""Largest number of entries of a list, dictionary or plain tensor whose contents are restored; a
vocabulary or a log is not looked through."""

SYNCHRONISED = ("require_backward_grad_sync", "require_forward_param_sync")
"""Attributes of DistributedDataParallel that make it communicate."""


def call_with_params(
    model: nn.Module,
    params: Params,
    function: Callable[[nn.Module], Value],
    attributes: "Attributes | None" = None,
) -> Value:
    """The value of function(model) with other parameters, and with copies of the buffers.

    Trap: take derivatives inside the function too. Activation checkpointing runs the model a
    second time during backward, and that run must see the same parameters.
    """
    with swapped(model, params, attributes):
        return function(model)


@contextmanager
def swapped(
    model: nn.Module, params: Params, attributes: "Attributes | None" = None
) -> Iterator[None]:
    """Swap in other parameters, and copies of the buffers: the model's, or those of a `Point`.

    A tensor is found by its identity, wherever modules hold it: under several names, in shared
    modules, in lists such as the `_flat_weights` of recurrent layers. Compiled models run without
    the compiler, whose code cannot be differentiated twice, and distributed ones without
    communication. Gradient hooks of the parameters are applied, as in training.

    `torch.func.functional_call` swaps a shared module twice, once for each name, and then restores
    the first swap in place of the parameter.

    The attributes are those of the model as it is now, where they are known already.
    """
    attributes = Attributes(model) if attributes is None else attributes
    parameters, given = attributes.parameters, params.buffers if isinstance(params, Point) else {}
    replacements = {id(parameters[n]): tensor for n, tensor in params.items()}
    replacements |= {id(b): given.get(n, b).clone() for n, b in attributes.buffers.items()}
    replacements |= {id(t): t.clone() for t in attributes.tensors if id(t) not in replacements}
    with ExitStack() as stack:
        stack.callback(attributes.restore)
        stack.enter_context(_without_cached_parametrizations())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, hooks in attributes.gradient_hooks.items():
            tensor = params.get(name)
            if tensor is not None and tensor.requires_grad:
                for hook in hooks:
                    stack.callback(tensor.register_hook(hook).remove)
        attributes.replace(replacements)
        if attributes.shards:
            stack.enter_context(gathered_when_read(model, attributes.shards))
        yield


@contextmanager
def _without_cached_parametrizations() -> Iterator[None]:
    """Inside of the user's parametrize.cached(), compute from the swapped parameters anyway."""
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before


class Attributes:
    """The attributes of all modules, and the contents of lists and dictionaries inside of them."""

    def __init__(self, model: nn.Module):
        self.parameters, self.buffers = named_parameters(model), named_buffers(model)
        self.devices = {p.device for p in self.parameters.values()}
        self.shards: dict[tuple[int, str], Shard] = {}
        """How the parameters of modules are split over processes; see `sharding`."""
        if any(map(is_sharded, self.parameters.values())):
            self.shards = find_shards(model)
        self.graph_checked = False
        """Whether `check_graph` has seen a loss of the model with these attributes."""
        self.contents: list[tuple[Any, Any]] = []
        """Containers with a copy of what they hold."""
        self._empty: list[Any] = []
        """Empty containers."""
        self._sizes: list[tuple[Any, int]] = []
        """Long containers with their length."""
        seen: set[int] = set()
        for module in model.modules():
            self.contents.append((vars(module), vars(module).copy()))
            self._add(vars(module).values(), seen)
        plain = [t for m in model.modules() for t in vars(m).values() if type(t) is Tensor]
        self.tensors = [t for t in plain if not t.requires_grad and t.numel() <= LONG]
        """Counters and the like, which forward may change in place."""
        self.gradient_hooks = {
            name: list(p._backward_hooks.values())
            for name, p in self.parameters.items()
            if p._backward_hooks
        }
        """By parameter, what changes its gradient."""
        self._swapped = [
            (container, key, value)
            for container, before in self.contents
            for key, value in (enumerate(before) if isinstance(before, list) else before.items())
            if isinstance(value, Tensor) or key in SYNCHRONISED
        ]
        """The entries that are replaced: container, key and value."""
        self._lengths, self._entries = self._lengths_now(), list(self._entries_now())

    def replace(self, replacements: dict[int, Tensor]) -> None:
        """Put other tensors, by the ids of those that they replace, wherever modules hold them."""
        for container, key, value in self._swapped:
            if id(value) in replacements:
                container[key] = replacements[id(value)]
            elif key in SYNCHRONISED and isinstance(value, bool):
                container[key] = False

    def _lengths_now(self) -> list[int]:
        return [len(container) for container, _ in self.contents]

    def _entries_now(self) -> Iterator[Any]:
        """All keys and values, one container after the other."""
        containers = [container for container, _ in self.contents]
        values = (c if isinstance(c, list) else c.values() for c in containers)
        return chain(chain.from_iterable(containers), chain.from_iterable(values))

    def _add(self, values: Iterable[Any], seen: set[int]) -> None:
        """Add the containers among these values, and those inside of them, each once."""
        for value in values:
            if type(value) not in CONTAINERS:
                continue
            if not value:
                self._empty.append(value)
            elif len(value) > LONG:
                self._sizes.append((value, len(value)))
            elif id(value) not in seen:
                seen.add(id(value))
                self.contents.append((value, value.copy()))
                self._add(value if isinstance(value, list) else value.values(), seen)

    def restore(self) -> None:
        """Restore the same objects, in the same order; of long containers only the length."""
        self._restore_lengths()
        # Nearly always nothing but the swapped entries has changed, and one comparison is fast.
        if self._lengths_now() == self._lengths:
            for container, key, value in self._swapped:
                container[key] = value
        same = self._lengths_now() == self._lengths
        if not same or not all(map(operator.is_, self._entries_now(), self._entries)):
            for container, before in self.contents:
                _restore(container, before)

    def _restore_lengths(self) -> None:
        """Restore the lengths of empty and long containers."""
        if any(self._empty):
            for container in self._empty:
                container.clear()
        for container, size in self._sizes:
            if isinstance(container, list):
                del container[size:]
            elif len(container) > size:
                _restore(container, dict(islice(container.items(), size)))


def _restore(container: Any, before: Any) -> None:
    """Make a dictionary or list hold the same objects in the same order as before."""
    if isinstance(container, list):
        container[:] = before
        return
    if len(container) == len(before) and all(
        map(operator.is_, chain(container, container.values()), chain(before, before.values()))
    ):
        return
    for key in container.keys() - before.keys():
        del container[key]
    if len(container) < len(before):
        container.clear()
    container.update(before)


def check_graph(model: nn.Module, loss: Tensor, leaves: Params) -> None:
    """Refuse a loss that depends on parameters which were not swapped: their gradient is missing.

    Not swapped are references outside of the modules, and parameters that are not registered.
    """
    names = {id(p): n for n, p in named_parameters(model).items()}
    used, swapped_in = leaves_of_graph(loss), {id(tensor) for tensor in leaves.values()}
    missed = [names[id(tensor)] for tensor in used if id(tensor) in names]
    if missed:
        raise InputError(
            f"the loss uses parameter {missed[0]!r} by a reference outside of the model's modules: "
            "in a closure, in functools.partial, or in a tensor that was computed from it "
            "beforehand. Read it from its module, as self.weight, inside of forward."
        )
    others = [t for t in used if isinstance(t, nn.Parameter) and id(t) not in swapped_in]
    if not others:
        return
    if not any(id(tensor) in swapped_in for tensor in used):
        raise InputError(
            "the loss depends on the parameters of another model and on none of this one: its "
            "forward was copied from there. Bind it to this model, with types.MethodType."
        )
    unregistered = _unregistered_parameters(model)
    hidden = [unregistered[id(tensor)] for tensor in others if id(tensor) in unregistered]
    if hidden:
        raise InputError(
            f"the loss uses trainable parameters in {hidden[0]!r} that are not registered, so that "
            "model.parameters() leaves them out: use nn.ModuleList or nn.ParameterList, or call "
            "requires_grad_(False) on them if they were not trained."
        )


def leaves_of_graph(loss: Tensor) -> list[Tensor]:
    """The tensors that autograd would accumulate gradients of a loss into."""
    leaves, nodes, seen = [], [loss.grad_fn], {loss.grad_fn}
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "CheckpointFunctionBackward":
            raise InputError(
                "the model uses activation checkpointing with use_reentrant=True, whose gradients "
                "exist only inside of backward(): pass use_reentrant=False, which gives the same."
            )
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(getattr(node, "variable"))  # noqa: B009 # torch declares no such attribute
        following = {parent for parent, _ in getattr(node, "next_functions", ())}
        nodes += following - seen - {None}
        seen |= following
    return leaves


def _unregistered_parameters(model: nn.Module) -> dict[int, str]:
    """The attributes that hold parameters of no module, or modules that are not registered."""
    names = {}
    for name, _, module in walk_modules(model):
        for attribute, value in vars(module).items():
            values = list(value.values()) if isinstance(value, dict) else value
            for item in values if isinstance(values, list | tuple) else [value]:
                parts = item.parameters() if isinstance(item, nn.Module) else [item]
                names |= {id(part): name + attribute for part in parts}
    return names


@contextmanager
def temporary_mode(
    model: nn.Module, *, training: bool, batch_norm: BatchNorm | None = None
) -> Iterator[None]:
    """Set the mode of every module, and restore modes and buffers.

    Batch norm is in training mode only where it uses the statistics of the batch. Parts in eval
    mode of a model in training mode stay so, as dropout of a frozen backbone did in training.

    Buffers that a forward pass adds (caches that start as None) are removed.
    """
    states = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    whole = not model.training
    recurrent = any(isinstance(module, nn.RNNBase) for module, _, _ in states)
    # cuDNN's recurrent layers have no backward in eval mode and no double backward at all.
    with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
        try:
            for module, was_training, _ in states:
                active = training and (was_training or whole)
                module.training = batch_norm == "batch" if is_batch_norm(module) else active
            yield
        finally:
            for module, was_training, buffers in states:
                module.training = was_training
                module._buffers.clear()
                module._buffers.update(buffers)


@contextmanager
def restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Restore the model's weights, buffers, gradients, modes and other attributes at the end.

    Yields a function that restores them at any time, for several trainings in a row.
    """
    parameters = list(model.parameters())
    tensors = [*parameters, *model.buffers()]
    values = [t.detach().clone() for t in tensors]
    gradients = [(p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    attributes = Attributes(model)

    def restore() -> None:
        attributes.restore()
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, (gradient, value) in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
            if gradient is not None and value is not None:
                gradient.copy_(value)

    try:
        yield restore
    finally:
        restore()


@contextmanager
def forked_randomness(
    devices: set[torch.device], generators: Sequence[Generator] = ()
) -> Iterator[None]:
    """Restore the random states of torch, numpy, Python and the given generators at the end."""
    states = [_state_of(generator) for generator in generators]
    cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 # the global state
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            _set_state(generator, state)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 # the global state


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
