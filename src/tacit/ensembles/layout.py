"""All parameters of a member as one flat row, so that entrywise operations run once per step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.objective.params import Params


def flatten_members(stacked: Tensor) -> Tensor:
    """Reshape a stacked tensor to (members, entries)."""
    return stacked.reshape(len(stacked), -1)


@dataclass(frozen=True)
class Layout:
    """The position of each named tensor in a member's flat row of parameters."""

    shapes: Mapping[str, torch.Size]

    @staticmethod
    def of(params: Params) -> "Layout":
        """The layout of stacked parameters."""
        return Layout({n: p.shape[1:] for n, p in params.items()})

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each tensor."""
        return [shape.numel() for shape in self.shapes.values()]

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """Copy stacked tensors into one tensor of shape (members, parameters)."""
        return torch.cat([flatten_members(params[n]) for n in self.shapes], 1)

    def views(self, flat: Tensor) -> Params:
        """The named tensors of a tensor (members, parameters), sharing its memory."""
        parts = zip(self.shapes.items(), flat.split(self.sizes, 1), strict=True)
        return {n: part.view(len(flat), *shape) for (n, shape), part in parts}

    def repeat_per_entry(self, values: Mapping[str, Tensor], members: int) -> Tensor:
        """Repeat values (members) of each tensor for all its entries; zero for other tensors."""
        example = next(iter(values.values()))
        parts = [
            values.get(n, example.new_zeros(members)).unsqueeze(1).expand(-1, size)
            for n, size in zip(self.shapes, self.sizes, strict=True)
        ]
        return torch.cat(parts, 1)
