"""The user's own model: the names of its modules and tensors, and models that are refused."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tacit.errors import InputError
from tacit.objective.params import Params, Point, check_finite, check_params, describe, shorten
from tacit.objective.ranks import is_sharded, own_rows, reshard
from tacit.objective.sharding import check_shards

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
    reshard(model)
    return _first_names(walk_modules(model), "_parameters")


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers by their own names, shared ones once."""
    return _first_names(walk_modules(model), "_buffers")


def _first_names(modules: Sequence[NamedModule], kind: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    seen: set[int] = set()
    for own, raw, tensor in _tensors_of(modules, kind):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[raw if own in named else own] = tensor
    return named


def _tensors_of(modules: Sequence[NamedModule], kind: str) -> Iterator[tuple[str, str, Tensor]]:
    """All own and raw names of the tensors in `_parameters` or in `_buffers`."""
    for own, raw, module in modules:
        for name, tensor in getattr(module, kind).items():
            if tensor is not None:
                yield own + name, raw + name, tensor


BatchNorm = Literal["batch", "running"]
"""Which statistics batch norm normalises with: those of the batch, or the running ones."""

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
        lambda p: hasattr(p, "ds_tensor"),
        "is sharded by DeepSpeed, so that its gradient is in parts: gather the full state dict and "
        "load it into an unwrapped copy of the model, or shard the model with fully_shard",
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
        lambda p: p.requires_grad and p._post_accumulate_grad_hooks,
        "has a hook that runs after its gradient is accumulated (to mask or clip it, or to step an "
        "optimizer), which is not applied here: remove it with the handle's remove(); for what "
        "changes the gradient use parameter.register_hook, which is applied",
    ),
    (
        lambda p: p.requires_grad and p.is_inference(),
        "was made in inference mode and has no gradient: build or load the model outside of it",
    ),
)
"""Tensors of a model that cannot be used, and what to do instead."""


def check_supported(modules: Sequence[NamedModule], parameters: dict[str, nn.Parameter]) -> None:
    """Refuse models whose gradients would be missing, in parts or not defined, with the remedy."""
    for name, _, module in modules:
        reason = _unsupported_module(module)
        if reason is not None:
            where = f"module {name[:-1]!r}" if name else "the model"
            raise InputError(f"{where} ({type(module).__name__}) {reason}.")
    buffers = _first_names(modules, "_buffers")
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in tensors.items():
            for is_unsupported, reason in UNSUPPORTED_TENSORS:
                if is_unsupported(tensor):
                    raise InputError(f"{kind} {name!r} {reason}.")
    _check_separate(parameters)
    _check_shards(modules, parameters)


def _check_shards(modules: Sequence[NamedModule], parameters: dict[str, nn.Parameter]) -> None:
    """Refuse models of which only some parameters are sharded, or otherwise than by rows."""
    sharded = [name for name, p in parameters.items() if is_sharded(p)]
    if not sharded:
        return
    for name in sharded:
        check_shards(name, parameters[name])
    if not any("FSDPModule" in _class_names(type(module)) for _, _, module in modules):
        raise InputError(
            f"parameter {sharded[0]!r} is a distributed tensor, and no module is one of "
            "torch.distributed.fsdp.fully_shard: shard the model with it, or gather the full state "
            "dict and load it into an unwrapped copy of the model."
        )
    whole = [name for name, p in parameters.items() if p.requires_grad and not is_sharded(p)]
    if whole:
        raise InputError(
            f"parameter {whole[0]!r} is not sharded, and {sharded[0]!r} is: call fully_shard on "
            "the whole model after its blocks, so that their gradients are summed alike."
        )


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
        if tensor.requires_grad and own_rows(tensor.detach()).numel():
            twin = memory.setdefault(own_rows(tensor.detach()).data_ptr(), name)
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
    if re.match(r"torch\..*\bquantized\b", type(module).__module__):
        return "is quantised and has no gradients: pass the model of before the quantisation"
    if "FullyShardedDataParallel" in _class_names(type(module)):
        return (
            "is sharded by the first version of FSDP, whose parameters have lost their shapes: "
            "shard it with torch.distributed.fsdp.fully_shard, or gather the full state dict and "
            "load it into an unwrapped copy of the model"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        return (
            "has sparse gradients (sparse=True), which have no second derivatives: set "
            "module.sparse = False, which gives the same gradient"
        )
    return None


def has_dropout(model: nn.Module) -> bool:
    """Whether layers of a model are in training mode and drop something."""
    return any(module.training and _dropout_rate(module) > 0 for module in model.modules())


def _dropout_rate(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.RNNBase | nn.MultiheadAttention) else 0.0


def trainable(model: nn.Module) -> Params:
    """Parameters with requires_grad=True, tied ones once, as views that share their memory.

    Their names are those of the user's own model, without the prefixes of wrappers. Of a sharded
    model they are the rows of this process.
    """
    reshard(model)
    modules = walk_modules(model)
    parameters = _first_names(modules, "_parameters")
    check_supported(modules, parameters)
    params = {n: own_rows(p.detach()) for n, p in parameters.items() if p.requires_grad}
    if not params:
        raise InputError(
            f"{type(model).__name__} has no trainable parameters, with requires_grad=True: "
            "unfreeze the ones that were trained."
        )
    return params


def _are_current(params: Any, current: Params) -> bool:
    """Whether these are the model's own parameters, in the same memory, and nothing else."""
    if type(params) is not dict or params.keys() != current.keys():
        return False

    def same_memory(a: Any, b: Tensor) -> bool:
        alike = isinstance(a, Tensor) and not is_sharded(a) and a.layout == b.layout
        return alike and (a.device, a.dtype) == (b.device, b.dtype) and a.is_set_to(b)

    return all(same_memory(params[n], p) for n, p in current.items())


def point_of(
    model: nn.Module,
    params: Mapping[str, Tensor] | None,
    *,
    what: str,
    statistics: Iterable[str] = (),
) -> Params:
    """The point to evaluate a model at: the given parameters, checked, or the model's current ones.

    Frozen parameters and second names of tied ones may be among them if their values agree.
    Buffers among them belong to the point, as in a state_dict. Those that are named as statistics
    must be: the model's own are right only for its current parameters.
    """
    current, names = trainable(model), list(statistics)
    if params is not None and not names and _are_current(params, current):
        return current  # checked when they were asked for
    buffers = named_buffers(model)
    statistics = {n: buffers[n].detach() for n in names}
    if params is None or _are_current(params, current):
        check_finite(current, what="the model's value")
        return Point(current, statistics) if statistics else current
    given: Params = {}
    if isinstance(params, Mapping):
        params = own_names(model, {**getattr(params, "buffers", {}), **params})
        params = {n: own_rows(p) for n, p in params.items()}
        given = {n: _check_buffer(params[n], b) for n, b in buffers.items() if n in params}
        redundant = _redundant_names(model, params)
        redundant |= {own for own, _, _ in _tensors_of(walk_modules(model), "_buffers")}
        params = {n: p for n, p in params.items() if n not in redundant}
    point = check_params(params, current, what=what)
    missing = [n for n in statistics if n not in given]
    if missing and not all(_equal(point[n], p) for n, p in current.items()):
        raise InputError(
            f"{what} has other weights than the model and no running statistics of its own "
            f"({shorten(missing)}), which batch_norm='running' needs: pass model.state_dict() of "
            "that time (a copy), or use batch_norm='batch', which needs none."
        )
    given = {**{n: statistics[n] for n in missing}, **given}
    return Point(point, given) if given else point


def _check_buffer(value: Any, buffer: Tensor) -> Tensor:
    """A buffer's value at another time, with its device and dtype."""
    if not isinstance(value, Tensor) or value.shape != buffer.shape:
        raise InputError(
            f"a buffer is {describe(value)}: pass a tensor of shape {tuple(buffer.shape)}, from "
            "the state_dict of the same architecture."
        )
    return value.detach().to(buffer)


def own_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> Params:
    """Tensors under the names of the user's own model, without the prefixes of any wrapper.

    Given may be the names of the model as it is wrapped, or a state dict of another wrapper around
    it, such as AveragedModel: then one prefix is common to all its parameters.
    """
    names = [name for name, p in named_parameters(model).items() if p.requires_grad]
    modules, kinds = walk_modules(model), ("_parameters", "_buffers")
    aliases = {raw: own for kind in kinds for own, raw, _ in _tensors_of(modules, kind)}
    renamed = {aliases.get(name, name): tensor for name, tensor in tensors.items()}
    if "n_averaged" not in aliases.values():
        renamed.pop("n_averaged", None)  # the counter of AveragedModel
    if all(name in renamed for name in names):
        return renamed
    stripped = _without_compiled(tensors)
    prefixes = [n.removesuffix(names[0]) for n in stripped if n.endswith(f".{names[0]}")]
    common = [p for p in ["", *prefixes] if all(p + name in stripped for name in names)]
    if len(common) != 1:
        return dict(tensors)
    return {name.removeprefix(common[0]): tensor for name, tensor in stripped.items()}


def _without_compiled(tensors: Mapping[str, Tensor]) -> Params:
    """Tensors without the parts of their names that no model of one's own has."""
    parts = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module)\.")
    stripped = {parts.sub("", str(name)): tensor for name, tensor in tensors.items()}
    stripped.pop("n_averaged", None)  # the counter of AveragedModel
    return stripped


def without_wrappers(tensors: Mapping[str, Tensor]) -> Params:
    """Tensors without the parts of their names that only wrappers have, where no model is known."""
    stripped = _without_compiled(tensors)
    while stripped and all(name.startswith("module.") for name in stripped):
        stripped = {name.removeprefix("module."): tensor for name, tensor in stripped.items()}
    return stripped


def _redundant_names(model: nn.Module, params: Mapping[str, Tensor]) -> set[str]:
    """Names of frozen parameters with the model's value, and of tied ones with their owner's."""
    owners = {id(p): n for n, p in named_parameters(model).items()}
    redundant = set()
    for name, _, parameter in _tensors_of(walk_modules(model), "_parameters"):
        owner = owners[id(parameter)]
        is_trained = parameter.requires_grad
        if name not in params or (is_trained and owner == name):
            continue
        parameter = own_rows(parameter.detach())
        expected = params.get(owner, parameter) if is_trained else parameter
        if _equal(params[name], expected):
            redundant.add(name)
    return redundant


def _equal(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return tensors and a.shape == b.shape and bool((a.to(b) == b).all())


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises with statistics of its batch or with running ones.

    All kinds of batch norm, and instance norm that keeps running statistics.
    """
    return isinstance(module, _BatchNorm) or isinstance(
        getattr(module, "running_mean", None), torch.Tensor
    )


def check_batch_norm(model: nn.Module, batch_norm: Any) -> BatchNorm | None:
    """The choice of statistics, checked: a model with batch norm needs one, another has no use.

    Training used the statistics of every batch, inference uses the running ones. The gradients
    differ, and neither is right for both.
    """
    if batch_norm not in (None, "batch", "running"):
        raise InputError(f"batch_norm is {batch_norm!r}: pass 'batch' or 'running'.")
    layers = {
        name: module for name, module in named_modules(model).items() if is_batch_norm(module)
    }
    names = shorten(name or type(module).__name__ for name, module in layers.items())
    if layers and batch_norm is None:
        raise InputError(
            f"the model has batch norm ({names}): choose its statistics. "
            "Objective(…, batch_norm='batch', batch_size=…) uses those of each batch, as training "
            "did; batch_norm='running' uses the running ones, as inference does and as fine-tuning "
            "with frozen batch norm did."
        )
    without = without_statistics(model)
    if without and batch_norm == "running":
        raise InputError(
            f"batch_norm='running', but {shorten(without)} keeps no running statistics: it always "
            "uses those of the batch. Pass batch_norm='batch'."
        )
    frozen = [n for n, m in layers.items() if not m.training] if model.training else []
    if batch_norm == "batch" and frozen and len(frozen) == len(layers):
        raise InputError(
            f"batch_norm='batch', but {names} is in eval mode in a model in training mode, as if "
            "it was frozen: pass batch_norm='running'. If it was not, call model.train() or "
            "model.eval(), to set the mode of all layers."
        )
    if batch_norm == "batch" and frozen:
        raise InputError(
            f"{shorten(frozen)} is in eval mode and other batch-norm layers are in training mode: "
            "one choice cannot hold for both. Replace frozen layers by "
            "torchvision.ops.FrozenBatchNorm2d, or call model.eval() to use one choice for all."
        )
    return batch_norm if layers or batch_norm == "batch" else None


def without_statistics(model: nn.Module) -> list[str]:
    """The batch-norm layers that keep no running statistics."""
    layers = named_modules(model).items()
    return [n for n, m in layers if is_batch_norm(m) and getattr(m, "running_mean", None) is None]


def running_statistics(model: nn.Module) -> list[str]:
    """The names of the buffers that batch norm's running statistics are in."""
    names = dict.fromkeys(
        f"{layer}.{name}" if layer else name
        for layer, module in named_modules(model).items()
        if is_batch_norm(module)
        for name in ("running_mean", "running_var")
    )
    return [name for name in named_buffers(model) if name in names]


def used_statistics(model: nn.Module, before: Params, after: Params) -> BatchNorm | None:
    """Which statistics batch norm used in between: frozen batch norm writes no running ones.

    None where that cannot be told: without batch norm, or with layers that never write.
    """
    if any(not after[name].equal(tensor) for name, tensor in before.items()):
        return "batch"
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    return "running" if any(layer.momentum != 0 for layer in layers) else None


def copy_statistics(model: nn.Module) -> Params:
    """Copies of batch norm's running statistics, by name."""
    buffers = named_buffers(model)
    return {name: buffers[name].clone() for name in running_statistics(model)}
