"""Linear equations in the strengths, design · λ = target, stored as small triangular factors.

Signs and scale, once: ∇L + Σ λ_k ∇R_k = 0, L the mean over examples, R a sum over parameters.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tacit.equations.files import read_file, write_file
from tacit.errors import InputError, check_type

if TYPE_CHECKING:
    from tacit.equations.target import Origin


class Family(NamedTuple):
    """The adjacent columns that came from one regularizer, and its kind."""

    name: str
    kind: str
    size: int


@dataclass(frozen=True)
class Source:
    """Where equations came from: the facts in the header of a summary."""

    mode: str
    """endpoint, difference or trajectory."""
    loss: str
    examples: int
    parameters: int
    tensors: int
    frozen: int
    tied: int
    dtype: str
    gradient_norm: float
    parameter_norm: float
    loss_value: float | None = None
    steps: int = 1
    known: dict[str, float] = field(default_factory=dict)
    unsettled: dict[str, float] = field(default_factory=dict)
    """By penalty: ‖mean of ∇R over an epoch − ∇R at the mean point‖ / ‖mean of ∇R‖."""
    normalised: dict[str, float] = field(default_factory=dict)
    """By layer whose weights a norm layer rescales: the smallest step size of an epoch, as a part
    of the largest of the run."""
    burn_in: float = 0.0
    """Norm of the part of the target that is due to an optimizer's averages, momentum or squared
    gradients, that were still settling."""
    unreached: tuple[str, ...] = ()
    """Parameters that the loss does not reach (an unused head); they have no equations."""
    unit: str = "examples"
    """What the mean is over: examples (or tokens), or batches whose examples interact."""
    ignored: float = 0.0
    """Part of the examples or tokens on which the loss does not depend: padding counted as data."""
    uneven: bool = False
    """Whether rows of one batch have more targets than those of another, and count the same."""
    epoch: bool = False
    """Whether these are the means over one epoch of a run."""
    layer: str = ""
    """The layer that the equations were restricted to, if any."""


@dataclass(frozen=True, eq=False)
class Block:
    """The equations of one layer at one point, as R of a QR factorisation of [design | targets].

    `columns` are those that are not zero in this layer; `factor` has one column for each of them,
    then one per target. RᵀR holds all inner products, and R keeps their full precision.
    `left_out` counts rows at kinks of a regularizer (θ = 0 under l1), which are in no equation.
    `floor` is the norm of a target that would be only rounding.
    """

    layer: str
    columns: tuple[int, ...]
    factor: Tensor
    rows: int
    left_out: int
    floor: float
    source: int = 0
    step: int = 0


@dataclass(frozen=True, eq=False)
class Equations:
    """Equations design · λ = target from one or many points.

    Stored as blocks of a few dozen numbers each, whatever the parameter count: stacking, fits by
    layer and saving all work on those.
    """

    families: tuple[Family, ...]
    names: tuple[str, ...]
    targets: int
    """Number of target columns: one per independent group of draws."""
    blocks: tuple[Block, ...]
    sources: tuple[Source, ...]
    origin: "Origin | None" = None
    """What they were written from; None for layers, steps, stacks and equations from a file."""

    def __getstate__(self) -> dict[str, Any]:
        """The state without the origin, because an objective may not be picklable."""
        return {**vars(self), "origin": None}

    @property
    def rows(self) -> int:
        """The number of equations."""
        return sum(block.rows for block in self.blocks)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have equations, in the model's order."""
        return tuple(dict.fromkeys(block.layer for block in self.blocks))

    @property
    def floor(self) -> float:
        """Norm of a target that would be only rounding."""
        return sum(block.floor**2 for block in self.blocks) ** 0.5

    def factor(self) -> Tensor:
        """The triangular factor of [design | targets]: at most as many rows as columns."""
        width = len(self.names) + self.targets
        factors = [_widen(block, len(self.names), width) for block in self.blocks]
        return triangular_factor(torch.cat([torch.zeros(0, width, dtype=torch.float64), *factors]))

    def layer(self, label: str) -> "Equations":
        """The equations of one layer, without the columns that are zero there."""
        if label not in self.layers:
            raise InputError(f"no layer {label!r}: there are {', '.join(self.layers)}.")
        blocks = tuple(block for block in self.blocks if block.layer == label)
        sources = tuple(replace(source, layer=label) for source in self.sources)
        equations = replace(self, blocks=blocks, sources=sources, origin=None)
        norms = equations.factor()[:, : len(self.names)].norm(dim=0)
        return equations.select_columns((norms > 0).nonzero()[:, 0].tolist())

    def steps(self, source: int = 0) -> list["Equations"]:
        """The equations of each step of a trajectory, in order; an endpoint has one step."""
        blocks: dict[int, list[Block]] = {}
        for block in self.blocks:
            if block.source == source:
                blocks.setdefault(block.step, []).append(block)
        return [replace(self, blocks=tuple(blocks[step]), origin=None) for step in sorted(blocks)]

    def select_columns(self, columns: Sequence[int]) -> "Equations":
        """The same equations with only these columns, in this order."""
        position = {column: i for i, column in enumerate(columns)}
        blocks = []
        for block in self.blocks:
            selected = [i for i, column in enumerate(block.columns) if column in position]
            targets = range(len(block.columns), block.factor.shape[1])
            factor = triangular_factor(block.factor[:, [*selected, *targets]])
            new_columns = tuple(position[block.columns[i]] for i in selected)
            blocks.append(replace(block, columns=new_columns, factor=factor))
        return replace(
            self,
            families=tuple(_select_families(self.families, position)),
            names=tuple(self.names[column] for column in columns),
            blocks=tuple(blocks),
            origin=None,
        )

    def matrices(self, strengths: Sequence[float]) -> Iterator[tuple[str, Sequence[float]]]:
        """Kind and coefficients of every diagonal or symmetric family among the strengths."""
        start = 0
        for family in self.families:
            if family.kind in ("diagonal", "symmetric"):
                yield family.kind, strengths[start : start + family.size]
            start += family.size

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the equations (safetensors): they are the costly part, and refitting is free."""
        header = {
            "families": self.families,
            "names": self.names,
            "targets": self.targets,
            "sources": [vars(source) for source in self.sources],
            "blocks": [
                {k: v for k, v in vars(block).items() if k != "factor"} for block in self.blocks
            ],
        }
        write_file(path, header, [block.factor for block in self.blocks])

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Equations":
        """Read equations that `save` wrote."""
        header, factors = read_file(path)
        return Equations(
            families=tuple(Family(*family) for family in header["families"]),
            names=tuple(header["names"]),
            targets=header["targets"],
            blocks=tuple(
                Block(**{**block, "columns": tuple(block["columns"])}, factor=factor)
                for block, factor in zip(header["blocks"], factors, strict=True)
            ),
            sources=tuple(
                Source(**{**source, "unreached": tuple(source.get("unreached", ()))})
                for source in header["sources"]
            ),
        )


def stack(equations: Iterable[Equations]) -> Equations:
    """Many endpoints, replicates or steps as one system with one shared λ."""
    example = "a list of equations, as in tacit.stack([first, second])"
    check_type("what stack was given", equations, Iterable, example)
    parts = list(equations)
    if not parts:
        raise InputError("stack was given no equations: pass at least one.")
    for part in parts:
        check_type("a part of a stack", part, Equations, "what endpoint_equations returns")
    first = parts[0]
    blocks: list[Block] = []
    sources: list[Source] = []
    for part in parts:
        if (part.names, part.targets) != (first.names, first.targets):
            raise InputError(
                f"equations in {part.names} with {part.targets} target columns do not stack on "
                f"{first.names} with {first.targets}: use the same regularizers and groups."
            )
        blocks += [replace(block, source=block.source + len(sources)) for block in part.blocks]
        sources += part.sources
    origin = first.origin if len(parts) == 1 else None
    return replace(first, blocks=tuple(blocks), sources=tuple(sources), origin=origin)


def triangular_factor(rows: Tensor) -> Tensor:
    """R of a QR factorisation: the same inner products in at most as many rows as columns."""
    return torch.linalg.qr(rows, mode="r").R if rows.shape[0] > 1 else rows


def running_factors(parts: Sequence[Tensor]) -> list[Tensor]:
    """For each part [design | targets], the factor of all parts before it."""
    factors = [parts[0][:0]]
    for part in parts[:-1]:
        factors.append(triangular_factor(torch.cat([factors[-1], part])))
    return factors


def _widen(block: Block, count: int, width: int) -> Tensor:
    """The block's factor with one column per strength, zero for strengths it does not involve."""
    wide = torch.zeros(len(block.factor), width, dtype=torch.float64)
    wide[:, [*block.columns, *range(count, width)]] = block.factor
    return wide


def _select_families(families: tuple[Family, ...], position: dict[int, int]) -> Iterable[Family]:
    start = 0
    for family in families:
        size = sum(column in position for column in range(start, start + family.size))
        if size:
            whole = size == family.size or family.kind not in ("diagonal", "symmetric")
            yield Family(family.name, family.kind if whole else "", size)
        start += family.size
