"""The data of an ensemble: one set for all members, or several sets and an assignment."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tacit.errors import InputError

GATHERED_ENTRIES = 2**24
"""Largest number of input entries that `MemberData.batches` gathers at once."""


@dataclass(frozen=True, eq=False)
class Data:
    """Data sets of equal size, and the data set of each member.

    Args:
        inputs: shape (sets, examples, …).
        targets: shape (sets, examples, …).
        assignment: the index of each member's data set; by default member m has set m.
    """

    inputs: Tensor
    targets: Tensor
    assignment: Sequence[int] | Tensor | None = None

    def __post_init__(self) -> None:
        if self.inputs.dim() < 2 or self.inputs.shape[:2] != self.targets.shape[:2]:
            raise InputError(
                f"inputs have shape {tuple(self.inputs.shape)} and targets have shape "
                f"{tuple(self.targets.shape)}: both must begin with (sets, examples). Stack the "
                "sets of all members."
            )

    @property
    def examples(self) -> int:
        """Number of examples in each set."""
        return self.inputs.shape[1]


@dataclass(frozen=True, eq=False)
class MemberData:
    """Checked data sets on the ensemble's device, with the index of each member's set."""

    inputs: Tensor
    targets: Tensor
    assignment: Tensor

    @property
    def examples(self) -> int:
        """Number of examples of each member."""
        return self.inputs.shape[1]

    def select(self, members: Tensor) -> "MemberData":
        """The data of some of the members."""
        return replace(self, assignment=self.assignment[members.to(self.assignment.device)])

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of each member at its example indices (members, examples)."""
        sets = self.assignment[:, None]
        return self.inputs[sets, indices], self.targets[sets, indices]

    def slices(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples of every member in order, `size` at a time."""
        for start in range(0, self.examples, size):
            part = slice(start, start + size)
            yield self.inputs[self.assignment, part], self.targets[self.assignment, part]

    def batches(self, order: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of each member's examples in its order; the last one may be smaller.

        Gathers as many batches at once as GATHERED_ENTRIES allows: one at a time costs a tenth
        more.
        """
        entries = max(1, self.inputs[0, 0].numel()) * len(order) * size
        gathered = size * max(1, GATHERED_ENTRIES // entries)
        for start in range(0, order.shape[1], gathered):
            inputs, targets = self.gather(order[:, start : start + gathered])
            yield from zip(inputs.split(size, dim=1), targets.split(size, dim=1), strict=True)


def assign_data(data: Any, members: int, like: Tensor) -> MemberData:
    """Check data for a number of members and move it to where `like` is.

    Floating-point tensors also take its dtype.
    """
    if not isinstance(data, Data):
        pair = isinstance(data, tuple | list) and len(data) == 2
        if not pair or not all(isinstance(part, Tensor) and part.dim() for part in data):
            raise InputError(
                f"data is a {type(data).__name__}: pass tensors (inputs, targets) that all members "
                "share, or ensembles.Data(inputs, targets, assignment)."
            )
        data = Data(data[0][None], data[1][None], [0] * members)
    sets = len(data.inputs)
    if not data.examples:
        raise InputError("data is empty: pass at least one example.")
    assignment = torch.as_tensor(range(sets) if data.assignment is None else data.assignment)
    whole = not assignment.dtype.is_floating_point and assignment.shape == (members,)
    if not whole or not bool(((assignment >= 0) & (assignment < sets)).all()):
        raise InputError(
            f"data has {sets} sets and an assignment of shape {tuple(assignment.shape)} for "
            f"{members} members: pass assignment=, one of 0 … {sets - 1} for each member."
        )
    return MemberData(
        _like(data.inputs, like), _like(data.targets, like), assignment.to(like.device)
    )


def _like(tensor: Tensor, like: Tensor) -> Tensor:
    moved = tensor.detach().to(like.device, like.dtype if tensor.is_floating_point() else None)
    if moved.is_floating_point() and not bool(torch.isfinite(moved).all()):
        raise InputError("data contains NaN or infinite values: leave out those examples.")
    return moved
