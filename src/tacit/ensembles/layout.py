"""All parameters of a member as one row, so that what acts on entries alone acts but once."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.objective.params import Params


def per_member(stacked: Tensor) -> Tensor:
    """A stacked tensor as (members, entries)."""
    return stacked.reshape(len(stacked), -1)


@dataclass(frozen=True)
class Layout:
    """Where each named tensor lies in a row of parameters."""

    shapes: Mapping[str, torch.Size]

    @staticmethod
    def of(params: Params) -> "Layout":
        """The layout of stacked parameters."""
        return Layout({n: p.shape[1:] for n, p in params.items()})

    @property
    def sizes(self) -> list[int]:
        """Entries of each tensor."""
        return [shape.numel() for shape in self.shapes.values()]

    def rows(self, params: Mapping[str, Tensor]) -> Tensor:
        """Stacked tensors as (members, parameters), copied."""
        return torch.cat([per_member(params[n]) for n in self.shapes], 1)

    def views(self, rows: Tensor) -> Params:
        """The named tensors, sharing the rows' memory."""
        parts = zip(self.shapes.items(), rows.split(self.sizes, 1), strict=True)
        return {n: part.view(len(rows), *shape) for (n, shape), part in parts}

    def spread(self, values: Mapping[str, Tensor], members: int) -> Tensor:
        """One value a member for every entry of each tensor; zero for tensors that have none."""
        some = next(iter(values.values()))
        parts = [
            values.get(n, some.new_zeros(members)).unsqueeze(1).expand(-1, size)
            for n, size in zip(self.shapes, self.sizes, strict=True)
        ]
        return torch.cat(parts, 1)
