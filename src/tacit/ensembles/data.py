"""Data of an ensemble: one set for all members, or several and who owns which; batches of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError

BLOCK = 2**24
"""Entries of inputs that are gathered at once."""


@dataclass(frozen=True, eq=False)
class Data:
    """Data sets of equal size, and which one each member has.

    Args:
        inputs: shape (sets, examples, …).
        targets: shape (sets, examples, …).
        owner: the data set of each member; by default member m has set m.
    """

    inputs: Tensor
    targets: Tensor
    owner: Sequence[int] | Tensor | None = None

    def __post_init__(self) -> None:
        if self.inputs.dim() < 2 or self.inputs.shape[:2] != self.targets.shape[:2]:
            raise InputError(
                f"inputs of shape {tuple(self.inputs.shape)} and targets of shape "
                f"{tuple(self.targets.shape)}: both must begin with (sets, examples)."
            )

    @property
    def examples(self) -> int:
        """Examples in each set."""
        return self.inputs.shape[1]


@dataclass(frozen=True, eq=False)
class Owned:
    """Data sets on the ensemble's device, with the set of each member as an index."""

    inputs: Tensor
    targets: Tensor
    owner: Tensor

    @property
    def examples(self) -> int:
        """Examples of each member."""
        return self.inputs.shape[1]

    def of(self, members: Tensor) -> "Owned":
        """The data of some of the members."""
        return Owned(self.inputs, self.targets, self.owner[members.to(self.owner.device)])

    def take(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Examples of each member by their numbers (members, examples)."""
        owner = self.owner[:, None]
        return self.inputs[owner, order], self.targets[owner, order]

    def slices(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples of every member in order, `size` at a time."""
        for start in range(0, self.examples, size):
            part = slice(start, start + size)
            yield self.inputs[self.owner, part], self.targets[self.owner, part]

    def batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each member's examples in its own order, in batches; the last may be smaller.

        As many batches are gathered at once as memory allows: one by one costs a tenth more.
        """
        entries = max(1, self.inputs[0, 0].numel()) * len(order) * size
        block = size * max(1, BLOCK // entries)
        for start in range(0, order.shape[1], block):
            inputs, targets = self.take(order[:, start : start + block])
            yield from zip(inputs.split(size, dim=1), targets.split(size, dim=1), strict=True)


def own_data(data: Any, members: int, like: Tensor) -> Owned:
    """The data for so many members, on the device and, where it is fractional, in the dtype."""
    if not isinstance(data, Data):
        if not (isinstance(data, tuple | list) and len(data) == 2):
            raise InputError(
                f"data is a {type(data).__name__}: pass (inputs, targets) that all members share, "
                "or ensembles.Data(inputs, targets, owner)."
            )
        inputs, targets = (part if isinstance(part, Tensor) else None for part in data)
        if inputs is None or targets is None or not inputs.dim() or not targets.dim():
            raise InputError("data holds no tensors of examples: pass (inputs, targets) tensors.")
        data = Data(inputs[None], targets[None], [0] * members)
    sets = len(data.inputs)
    if not data.examples:
        raise InputError("data is empty: pass at least one example.")
    owner = torch.as_tensor(range(sets) if data.owner is None else data.owner)
    whole = not owner.dtype.is_floating_point and owner.shape == (members,)
    if not whole or not bool(((owner >= 0) & (owner < sets)).all()):
        raise InputError(
            f"data has {sets} sets and owners of shape {tuple(owner.shape)} for {members} members: "
            f"pass owner=, one of 0 … {sets - 1} for each member."
        )
    return Owned(_placed(data.inputs, like), _placed(data.targets, like), owner.to(like.device))


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
    placed = tensor.detach().to(device=like.device, dtype=dtype)
    if placed.is_floating_point() and not bool(torch.isfinite(placed).all()):
        raise InputError("data holds NaN or infinite values: leave such examples out.")
    return placed
