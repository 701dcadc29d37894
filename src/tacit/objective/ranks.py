"""The processes that share a model: who has other examples, and who has which rows of parameters.

Under DistributedDataParallel every process has all parameters and its own examples. Under
`fully_shard` (FSDP2) it also has only some rows of every parameter; on a mesh of two dimensions
several processes have the same rows. Each computes with what it has. Only numbers, factors of a
few columns, and what the model itself gathers travel between them.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from tacit.errors import InputError

Item = TypeVar("Item")
Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class Ranks(AbstractContextManager["Ranks"]):
    """Groups of processes of torch.distributed; each is None where there is only this process.

    Inside `with ranks:` norms, counts and factors of parameters are those of all their rows.
    """

    everyone: Any = None
    """All processes: each has examples of its own."""
    shards: Any = None
    """Those that together have all rows of every parameter."""
    replicas: Any = None
    """Those that have the same rows of every parameter."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the numbers that travel have to be."""
    _entered: list[Token["Ranks"]] = field(default_factory=list, compare=False, repr=False)

    def __enter__(self) -> "Ranks":
        self._entered.append(_CURRENT.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._entered.pop())

    @property
    def count(self) -> int:
        """The number of processes."""
        return _size(self.everyone)

    @property
    def number(self) -> int:
        """The number of this process, from 0."""
        return _rank(self.everyone)

    @property
    def part(self) -> int:
        """Which part of the rows of parameters this process has, from 0."""
        return _rank(self.shards)

    def gather(self, value: Item) -> list[Item]:
        """A small object of every process, in their order."""
        if self.everyone is None:
            return [value]
        return _gather_objects(value, self.everyone)

    def gather_numbers(self, number: float) -> list[float]:
        """A number of every process, in their order; faster than an object."""
        if self.everyone is None:
            return [number]
        here = torch.tensor([number], dtype=torch.float64, device=self.device)
        numbers = [torch.empty_like(here) for _ in range(self.count)]
        distributed.all_gather(numbers, here, group=self.everyone)
        return [float(there) for there in numbers]

    def first(self, value: Item | None) -> Item | None:
        """The object of the first process that has one."""
        if self.everyone is None:
            return value
        has_one = self.gather_numbers(value is not None)
        if not any(has_one):
            return None
        values = [None if value is None else _packed(value)]
        source = has_one.index(1)
        distributed.broadcast_object_list(
            values, group=self.everyone, group_src=source, device=self.device
        )
        return pickle.loads(values[0] or b"")

    def sum_over_replicas(self, tensors: Sequence[Tensor]) -> None:
        """Add up the tensors of all processes that have the same rows, in place."""
        if self.replicas is not None:
            for tensor in tensors:
                distributed.all_reduce(tensor, group=self.replicas)

    def gather_parts(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of one shape from each of the processes that together have all rows."""
        if self.shards is None:
            return [tensor]
        parts = [torch.empty_like(tensor, device=self.device) for _ in range(_size(self.shards))]
        distributed.all_gather(parts, tensor.to(self.device).contiguous(), group=self.shards)
        return [part.to(tensor.device) for part in parts]

    def sum_parts(self, numbers: Tensor) -> Tensor:
        """Numbers of a part of the rows, summed over all parts; the same in every process."""
        return numbers if self.shards is None else sum(self.gather_parts(numbers), 0 * numbers)

    def largest_of_parts(self, number: float) -> float:
        """The largest of a number of every part."""
        parts = self.gather_parts(torch.tensor(number, dtype=torch.float64))
        return float(torch.stack(parts).max())

    def place(self, part: Tensor) -> tuple[int, slice]:
        """How many entries a tensor has in all processes, and which of them are here."""
        if self.shards is None:
            return part.numel(), slice(0, part.numel())
        sizes = [int(size) for size in self.gather_parts(torch.tensor(part.numel()))]
        start = sum(sizes[: self.part])
        return sum(sizes), slice(start, start + sizes[self.part])

    def whole(self, part: Tensor) -> tuple[Tensor, slice]:
        """A whole tensor from the rows of every process, and which of its entries are here."""
        heights = self.gather_parts(torch.tensor(len(part)))
        tallest, inner = max(map(int, heights)), part.shape[1:]
        padded = torch.cat([part, part.new_zeros(tallest - len(part), *inner)])
        rows = zip(self.gather_parts(padded), heights, strict=True)
        whole = torch.cat([there[: int(height)] for there, height in rows])
        return whole, self.place(part)[1]

    @property
    def share(self) -> float:
        """The part of a process in a sum over those that share rows, where all have the same."""
        return 1 / _size(self.shards)

    @contextmanager
    def agreeing(self, *, after_models: bool = False) -> Iterator[None]:
        """Raise an error of one process in all of them, so that none waits for it for ever.

        Not after running a model that gathers its parameters: then the others are inside of it, and
        stop when this process ends.
        """
        if self.everyone is None or (after_models and self.shards is not None):
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # raised again below
            error = caught
        self.check(error)

    def check(self, error: Exception | None) -> None:
        """Raise this process's error, or say which other process has one."""
        messages = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for number, message in enumerate(messages):
            if message is not None:
                raise InputError(f"process {number} of {self.count} stopped with {message}")

    def check_same(self, value: Any, what: str) -> None:
        """Refuse calls that differ between processes that share rows: they would be mixed."""
        if self.shards is None:
            return
        first, *others = self.gather(value)
        for number, other in enumerate(others, 1):
            if other != first:
                raise InputError(
                    f"process 0 has {what} {first}, and process {number} has {other}: make the "
                    "same call with the same arguments in all processes."
                )

    def in_step(self, items: Iterator[Item], spare: Item) -> Iterator[tuple[Item, bool]]:
        """The items of this process; while only others have some, the spare one, which is marked.

        Processes that gather parameters within the model must all run it, as often as any of them.
        """
        if self.shards is None:
            yield from ((item, True) for item in items)
            return
        while True:
            item, error = None, None
            try:
                item = next(items, None)
            except Exception as caught:  # raised again by check
                error = caught
            states = self.gather_numbers(2 if error else int(item is not None))
            if max(states) == 2:
                self.check(error)
            if not any(states):
                return
            yield (spare, False) if item is None else (item, True)


ALONE = Ranks()
"""One process, which has everything."""
_CURRENT: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current_ranks() -> Ranks:
    """The processes that share the parameters of the computation that is running."""
    return _CURRENT.get()


def on_its_ranks(function: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Run a function on the processes of its first argument, which has them as `.ranks`."""

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        first = args[0] if args else next(iter(kwargs.values()), None)
        with getattr(first, "ranks", ALONE):
            return function(*args, **kwargs)

    return run


def ranks_of(model: nn.Module) -> Ranks:
    """The processes that share a model; only this one where it is not distributed."""
    reshard(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    sharded: list[Any] = [p for p in model.parameters() if is_sharded(p)]
    meshes = {p.device_mesh: p for p in sharded}
    if meshes:
        if len(meshes) > 1:
            raise InputError(
                "the parameters are sharded over several device meshes: pass one mesh to every "
                "call of fully_shard."
            )
        (parameter,) = meshes.values()
        return _ranks_of_mesh(parameter.device_mesh, tuple(parameter.placements), device)
    for module in model.modules():
        if type(module).__name__ == "DistributedDataParallel":
            group = module.process_group
            return Ranks(everyone=group, replicas=group, device=device)
    return ALONE


def check_alone(ranks: Ranks, what: str, *, shards_only: bool = False) -> None:
    """Refuse what one process computes, for a model that several share, or share the rows of."""
    if (ranks.shards if shards_only else ranks.everyone) is not None:
        raise InputError(
            f"{what} is computed by one process, and {ranks.count} share this model: gather the "
            "full state dict, and load it into an unwrapped copy of the model in one process."
        )


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is one of torch's distributed tensors, of which a process has a part."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def own_rows(tensor: Any) -> Any:
    """The rows of a tensor that this process has, as a plain tensor in the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def reshard(model: nn.Module) -> None:
    """Release what torch's hooks have gathered: after a forward pass the root's stay gathered."""
    for module in model.modules():
        release: Any = getattr(type(module), "reshard", None)
        if release is not None and hasattr(type(module), "unshard"):
            release(module)


@lru_cache(maxsize=16)
def _ranks_of_mesh(mesh: Any, placements: tuple[Any, ...], device: torch.device) -> Ranks:
    dimensions = [d for d, placement in enumerate(placements) if placement.is_shard()]
    rest = [d for d in range(mesh.ndim) if d not in dimensions]
    if len(dimensions) != 1 or len(rest) > 1:
        raise InputError(
            f"parameters are placed as {placements} on a mesh of {mesh.ndim} dimensions: pass "
            "models of fully_shard on a mesh of one dimension, or of (replicas, shards)."
        )
    shards = mesh.get_group(dimensions[0])
    if not rest:
        return Ranks(everyone=shards, shards=shards, device=device)
    if mesh.size() == distributed.get_world_size():
        everyone = distributed.group.WORLD
    else:
        members = sorted(mesh.mesh.flatten().tolist())
        everyone = distributed.new_group(members, use_local_synchronization=True)
    return Ranks(everyone, shards, mesh.get_group(rest[0]), device)


def _gather_objects(value: Item, group: Any) -> list[Item]:
    values: list[Any] = [None] * _size(group)
    distributed.all_gather_object(values, _packed(value), group=group)
    return [pickle.loads(packed) for packed in values]


class _Pickler(pickle.Pickler):
    """Writes only what a view of a tensor shows, and no device of another process.

    Otherwise all of its memory is written: the first batch may be a view of all the data.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided:
            return NotImplemented
        if value.device.type != "cpu":
            return _to_device, (value.detach().cpu(), value.device.type)
        if value.untyped_storage().nbytes() > value.numel() * value.element_size():
            return value.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _to_device(tensor: Tensor, kind: str) -> Tensor:
    return tensor.to(kind)  # of several, the one that this process has chosen


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _size(group: Any) -> int:
    return 1 if group is None else distributed.get_world_size(group)


def _rank(group: Any) -> int:
    return 0 if group is None else distributed.get_rank(group)
