"""Equations of one layer at one point, stored as a small triangular factor."""

from dataclasses import dataclass, replace

from torch import Tensor

from tacit.equations.factors import triangular_factor
from tacit.equations.noise import select_scatter


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
