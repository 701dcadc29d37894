"""The user's own model: the names of its modules and tensors, and models that are refused."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tacit.errors import InputError

WRAPPERS = {
    "OptimizedModule": "_orig_mod",  # torch.compile
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "AveragedModel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "PeftModel": "base_model",
    "BaseTuner": "model",  # inside of a PeftModel
}
"""Classes that wrap a model, and the child that is the model; it has no part in own names."""


class NamedModule(NamedTuple):
    """A module under one of its names; prefixes are empty or end with a dot."""

    own: str
    """The prefix of its tensors in the user's own model, without wrappers."""
    raw: str
    """The prefix of its tensors in `named_parameters()` and in `state_dict()`."""
    module: nn.Module


def walk_modules(model: nn.Module) -> list[NamedModule]:
    """All modules in torch's order, each under all its names."""
    modules: list[NamedModule] = []

    def visit(module: nn.Module, own: str, raw: str) -> None:
        modules.append(NamedModule(own, raw, module))
        wrapped = _wrapped_children(type(module))
        for key, child in module._modules.items():
            if child is not None:
                visit(child, own if key in wrapped else f"{own}{key}.", f"{raw}{key}.")

    visit(model, "", "")
    return modules


@lru_cache(maxsize=1024)
def _wrapped_children(cls: type) -> list[str]:
    """The names of the children that a class wraps; none for a class that is no wrapper."""
    return [WRAPPERS[name] for name in _class_names(cls) if name in WRAPPERS]


@lru_cache(maxsize=1024)
def _class_names(cls: type) -> frozenset[str]:
    """The names of a class and of those that it inherits from."""
    return frozenset(base.__name__ for base in cls.__mro__)


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by their own names, shared ones once, and without wrappers."""
    names: dict[nn.Module, str] = {}
    for own, _, module in walk_modules(model):
        names.setdefault(module, own[:-1])
    return {name: module for module, name in names.items()}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their own names, tied ones once: as torch's, without wrappers' prefixes."""
    return _first_names(walk_modules(model), "_parameters")


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers by their own names, shared ones once."""
    return _first_names(walk_modules(model), "_buffers")


def named_tensors(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """The parameters and the buffers by their own names, in one walk."""
    modules = walk_modules(model)
    return _first_names(modules, "_parameters"), _first_names(modules, "_buffers")


def _first_names(modules: list[NamedModule], kind: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    seen: set[int] = set()
    for own, raw, tensor in _all_names(modules, kind):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[raw if own in named else own] = tensor
    return named


def all_names(model: nn.Module, kind: str) -> Iterator[tuple[str, str, Tensor]]:
    """All own and raw names of the `_parameters` or `_buffers`."""
    return _all_names(walk_modules(model), kind)


def _all_names(modules: list[NamedModule], kind: str) -> Iterator[tuple[str, str, Tensor]]:
    for own, raw, module in modules:
        for name, tensor in getattr(module, kind).items():
            if tensor is not None:
                yield own + name, raw + name, tensor


UNSUPPORTED_TENSORS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda p: isinstance(p, UninitializedParameter | UninitializedBuffer),
        "belongs to a lazy module and has no shape: run one batch through the model",
    ),
    (
        lambda p: p.is_meta,
        "is on the meta device and has no values: load the trained weights first",
    ),
    (
        lambda p: hasattr(p, "ds_tensor") or "DTensor" in _class_names(type(p)),
        "is sharded over devices, so that its gradient is in parts: gather the full state dict and "
        "load it into an unwrapped copy of the model",
    ),
    (
        lambda p: p.requires_grad and p.is_complex(),
        "is complex, and strengths are defined for real parameters: train the real and imaginary "
        "parts as one real parameter, and join them in forward with torch.view_as_complex",
    ),
    (
        lambda p: p.requires_grad and p.layout != torch.strided,
        "is stored as a sparse tensor, with gradients only where it is not zero: make it dense "
        "with to_dense(), and mask it in forward",
    ),
    (
        lambda p: p.requires_grad and p.is_inference(),
        "was made in inference mode and has no gradient: build or load the model outside of it",
    ),
)
"""Tensors of a model that cannot be used, and what to do instead."""


def check_supported(model: nn.Module) -> None:
    """Refuse models whose gradients would be missing, in parts or not defined, with the remedy."""
    for name, _, module in walk_modules(model):
        reason = _unsupported_module(module)
        if reason is not None:
            where = f"module {name[:-1]!r}" if name else "the model"
            raise InputError(f"{where} ({type(module).__name__}) {reason}.")
    parameters, buffers = named_tensors(model)
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in tensors.items():
            for is_unsupported, reason in UNSUPPORTED_TENSORS:
                if is_unsupported(tensor):
                    raise InputError(f"{kind} {name!r} {reason}.")
    _check_separate(parameters)


def _check_separate(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that are no `nn.Parameter`, or two in the same memory."""
    memory: dict[int, str] = {}
    for name, tensor in parameters.items():
        if not isinstance(tensor, nn.Parameter):
            raise InputError(
                f"parameter {name!r} is a plain tensor that no optimizer trains, as "
                "torch.func.functional_call leaves behind in a module with two names: make a new "
                "model, load its weights, and pass functional_call a copy of the model."
            )
        if tensor.requires_grad and tensor.numel():
            twin = memory.setdefault(tensor.data_ptr(), name)
            if twin != name:
                raise InputError(
                    f"parameters {twin!r} and {name!r} are two tensors in the same memory, so "
                    "each has only its part of the gradient: share one parameter instead, as in "
                    "decoder.weight = encoder.weight."
                )


def _unsupported_module(module: nn.Module) -> str | None:
    """Why a module has no usable gradients, and what to do; None if it has."""
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "is scripted or traced, so that its parameters cannot be replaced: pass the Python "
            "module that it was made from, with load_state_dict(scripted.state_dict())"
        )
    if ".quantized" in type(module).__module__:
        return "is quantised and has no gradients: pass the model of before the quantisation"
    if _class_names(type(module)) & {"FullyShardedDataParallel", "FSDPModule"}:
        return (
            "is sharded (FSDP), so that each process has a part of every gradient: gather the full "
            "state dict and load it into an unwrapped copy of the model"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        return (
            "has sparse gradients (sparse=True), which have no second derivatives: set "
            "module.sparse = False, which gives the same gradient"
        )
    return None
