"""Equations of one layer at one point, stored as a small triangular factor."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit.equations.factors import triangular_factor
from tacit.equations.noise import select_scatter
from tacit.objective.ranks import current_ranks


@dataclass(frozen=True, eq=False)
class Block:
    """The equations of one layer at one point, as R of a QR factorisation of [design | targets].

    `columns` are those that are not zero in this layer; `factor` has one column for each of them,
    then one per target. RᵀR holds all inner products, and R keeps their full precision.
    `left_out` counts rows at kinks of a regularizer (θ = 0 under l1), which are in no equation.
    `floor` is the norm of a target that would be only rounding. Columns in `noisy` are means over
    groups of probes, and `scatter` has products of the groups' deviations: see `noise.Scatter`.
    """

    layer: str
    columns: tuple[int, ...]
    factor: Tensor
    rows: int
    left_out: int
    floor: float
    source: int = 0
    step: int = 0
    points: int = 1
    """In `Equations.means`: how many sources or steps it is of, this one and every second later."""
    noisy: tuple[int, ...] = ()
    scatter: Tensor | None = None


def select_from_block(block: Block, position: dict[int, int]) -> Block:
    """The block with only these columns, at these positions."""
    selected = [i for i, column in enumerate(block.columns) if column in position]
    targets = range(len(block.columns), block.factor.shape[1])
    factor = triangular_factor(block.factor[:, [*selected, *targets]])
    columns = tuple(position[block.columns[i]] for i in selected)
    places, scatter = select_scatter(block, selected)
    noisy = tuple(columns[place] for place in places)
    return replace(block, columns=columns, factor=factor, noisy=noisy, scatter=scatter)


def join_parts(blocks: Sequence[Block]) -> list[Block]:
    """The blocks of all rows, where each process has written those of its own rows.

    All processes have blocks of the same layers and columns. What travels are their factors.
    """
    ranks = current_ranks()
    if ranks.shards is None:
        return list(blocks)
    parts = ranks.gather_parts(torch.cat([_numbers(block) for block in blocks]))
    of_blocks = zip(
        *(part.split([_size(block) for block in blocks]) for part in parts), strict=True
    )
    return [_joined(block, numbers) for block, numbers in zip(blocks, of_blocks, strict=True)]


def _size(block: Block) -> int:
    return 2 + block.factor.shape[1] ** 2 + (0 if block.scatter is None else block.scatter.numel())


def _numbers(block: Block) -> Tensor:
    """The numbers of a block that add up over processes, with a factor of full height."""
    counts = torch.tensor([block.rows, block.left_out], dtype=torch.float64)
    height, width = block.factor.shape
    factor = torch.cat([block.factor, block.factor.new_zeros(width - height, width)])
    scatter = [] if block.scatter is None else [block.scatter.flatten()]
    return torch.cat([counts, factor.flatten(), *scatter])


def _joined(block: Block, parts: Sequence[Tensor]) -> Block:
    width = block.factor.shape[1]
    stacked = torch.stack(list(parts))
    factor = triangular_factor(stacked[:, 2 : 2 + width**2].reshape(-1, width))
    rows, left_out = (int(number) for number in stacked[:, :2].sum(0))
    scatter = block.scatter
    if scatter is not None:
        scatter = stacked[:, 2 + width**2 :].sum(0).view(scatter.shape)
    return replace(block, factor=factor, rows=rows, left_out=left_out, scatter=scatter)
