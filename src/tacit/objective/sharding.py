"""Running a model of `fully_shard` (FSDP2) with parameters of our own, differentiable twice.

Torch's hooks gather and release the parameters of one module after the other, and second
derivatives through them are wrong. Here they are set aside: a module gathers a parameter when it
reads it, and autograd keeps the rows of this process in place of the whole, which is gathered again
when the backward pass needs it.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tacit.errors import InputError
from tacit.objective.ranks import is_sharded, own_rows


class Shard(NamedTuple):
    """How the rows of a tensor are split over a group of processes.

    Into equal parts, the last ones smaller or empty.
    """

    group: Any
    rows: int
    """Of the whole tensor."""

    @property
    def height(self) -> int:
        """The number of rows of the largest part."""
        return -(-self.rows // distributed.get_world_size(self.group))

    @property
    def here(self) -> slice:
        """The rows of this process."""
        start = min(distributed.get_rank(self.group) * self.height, self.rows)
        return slice(start, min(start + self.height, self.rows))


def shard_of(tensor: Any) -> Shard:
    """How a tensor of `fully_shard` is split."""
    (dimension,) = (d for d, placed in enumerate(tensor.placements) if placed.is_shard())
    return Shard(tensor.device_mesh.get_group(dimension), tensor.shape[0])


def check_shards(name: str, tensor: Any) -> None:
    """Refuse parameters that are split otherwise than by rows, over one dimension of a mesh."""
    kinds = [type(placed).__name__ for placed in tensor.placements]
    split = [placed for placed in tensor.placements if placed.is_shard()]
    if len(split) != 1 or split[0].dim != 0 or set(kinds) - {"Shard", "Replicate"}:
        raise InputError(
            f"parameter {name!r} is placed as {tuple(tensor.placements)}, and only rows that are "
            "split once are followed here, as by fully_shard(model): leave out tensor parallelism "
            "and shard_placement_fn, or gather the full state dict and load it into an unwrapped "
            "copy of the model."
        )


@torch.no_grad()
def gather_rows(part: Tensor, shard: Shard) -> Tensor:
    """The whole tensor, in every process."""
    padded = part
    if len(part) < shard.height:
        padded = part.new_zeros(shard.height, *part.shape[1:])
        padded[: len(part)] = part
    count = distributed.get_world_size(shard.group)
    whole = part.new_empty(shard.height * count, *part.shape[1:])
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(whole, padded.detach().contiguous(), group=shard.group)
    return whole[: shard.rows]


@torch.no_grad()
def sum_rows(whole: Tensor, shard: Shard) -> Tensor:
    """This process's rows of the sum of a tensor over all processes."""
    count = distributed.get_world_size(shard.group)
    padded = whole.contiguous()
    if len(whole) < shard.height * count:
        padded = whole.new_zeros(shard.height * count, *whole.shape[1:])
        padded[: len(whole)] = whole
    part = whole.new_empty(shard.height, *whole.shape[1:])
    scatter = getattr(distributed, "reduce_scatter_single", None)
    scatter = scatter or distributed.reduce_scatter_tensor
    scatter(part, padded, group=shard.group)
    return part[: shard.here.stop - shard.here.start]


class _Gather(torch.autograd.Function):
    """The whole of a tensor from its parts; what is differentiated is a sum over processes."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return gather_rows(part, shard)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _SumRows.apply(gradients[0], ctx.shard), None


class _SumRows(torch.autograd.Function):
    """The adjoint of `_Gather`, and the other way round."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        return sum_rows(whole, shard)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Gather.apply(gradients[0], ctx.shard), None


class _Saved(NamedTuple):
    """A gathered tensor, or a view of one, that autograd has saved."""

    part: Tensor
    shard: Shard
    layout: tuple[Any, Any, int]
    """Size, stride and offset."""


class _Gathering:
    """Gathers the parameters of a model when they are read, and again when autograd needs them."""

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[Any, Tensor] = weakref.WeakValueDictionary()
        """Gathered tensors that are still in use, by the id of what each was gathered from, which
        several modules may share."""
        self._latest: tuple[int, list[Tensor]] = 0, []
        """Those of the module that was read last: it may read them several times."""
        self._parts: dict[int, tuple[Tensor, Shard]] = {}
        """By the memory of a tensor in `_latest`, what it was gathered from."""

    def read(self, owner: int, value: Any, shard: Shard) -> Tensor:
        """The whole of a parameter of a module, with its graph."""
        part, whole = own_rows(value), self._alive.get(id(value))
        graph_is_missing = part.requires_grad and torch.is_grad_enabled()
        if whole is None or (graph_is_missing and whole.grad_fn is None):
            gathered: Any = _Gather.apply(part, shard)
            self._alive[id(value)] = whole = gathered
        if self._latest[0] != owner:
            self._latest, self._parts = (owner, []), {}
        self._latest[1].append(whole)
        self._parts[whole.untyped_storage().data_ptr()] = part, shard
        return whole

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps in place of a tensor."""
        origin = self._parts.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if origin is None:
            return tensor
        layout = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return _Saved(*origin, layout)

    def unpack(self, saved: Any) -> Tensor:
        """The tensor that autograd asked for."""
        if not isinstance(saved, _Saved):
            return saved
        whole = gather_rows(saved.part, saved.shard)
        return whole.as_strided(*saved.layout)


class _GatheredParameters(dict[str, Any]):
    """The `_parameters` of a module: those that are sharded are gathered when they are read."""

    def __init__(self, parts: dict[str, Any], shards: dict[str, Shard], gathering: _Gathering):
        super().__init__(parts)
        self._shards, self._gathering = shards, gathering

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name not in self._shards:
            return value
        return self._gathering.read(id(self), value, self._shards[name])

    def items(self) -> Any:
        """As `model.parameters()` reads them, in a loss that has a penalty of all parameters."""
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        return (self[name] for name in self)


@contextmanager
def gathered_when_read(model: nn.Module, shards: dict[tuple[int, str], Shard]) -> Iterator[None]:
    """Set the hooks of `fully_shard` aside, and gather every parameter when a module reads it."""
    gathering = _Gathering()
    with ExitStack() as stack:
        for module in model.modules():
            own = {n: s for n in module._parameters if (s := shards.get((id(module), n)))}
            changed: dict[str, Any] = {
                kind: type(hooks)((k, h) for k, h in hooks.items() if not _is_of_fsdp(h))
                for kind in ("_forward_pre_hooks", "_forward_hooks")
                if any(map(_is_of_fsdp, (hooks := vars(module)[kind]).values()))
            }
            methods = {name: value for name, value in vars(module).items() if _is_wrapped(value)}
            changed |= {name: method.__wrapped__ for name, method in methods.items()}
            if own:
                parameters = _GatheredParameters(module._parameters, own, gathering)
                changed["_parameters"] = parameters
            for key, value in changed.items():
                stack.callback(vars(module).__setitem__, key, vars(module)[key])
                vars(module)[key] = value
        stack.enter_context(saved_tensors_hooks(gathering.pack, gathering.unpack))
        yield


def find_shards(model: nn.Module) -> dict[tuple[int, str], Shard]:
    """How the parameters of every module are split, by the id of the module and the name."""
    return {
        (id(module), name): shard_of(parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if is_sharded(parameter)
    }


def _is_wrapped(value: Any) -> bool:
    """Whether it is a method of `register_fsdp_forward_method`, which gathers parameters itself."""
    code = getattr(getattr(value, "__func__", None), "__code__", None)
    return code is not None and code.co_qualname.startswith("register_fsdp_forward_method.")


def _is_of_fsdp(hook: Any) -> bool:
    module = getattr(hook, "__module__", "") or ""
    return module.startswith(("torch.distributed.fsdp", "torch.distributed._composable"))
