"""Linear equations in the strengths, design · λ = target, kept as small triangular factors.

Signs and scale, once: ∇L + Σ λ_k ∇R_k = 0, L the mean over examples, R a sum over parameters.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.errors import InputError

FORMAT, EARLIER = "tacit equations 2", "tacit equations 1"
"""What files say they are; the earlier one did not tell epochs from other trajectories."""


class Family(NamedTuple):
    """Which columns, next to each other, came from one regularizer, and what kind it is."""

    name: str
    kind: str
    size: int


@dataclass(frozen=True)
class Source:
    """Where equations came from: what a summary says above its table."""

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
    """How far a gradient's mean over an epoch is from its value at the mean point, relative."""
    epoch: bool = False
    """Whether these are the means over one epoch of a run, beside others of the same run."""
    layer: str = ""
    """The layer that the equations were cut down to, if any."""


@dataclass(frozen=True, eq=False)
class Block:
    """The equations of one layer at one point, as R of a QR factorisation of [design | targets].

    `columns` are the ones that are not zero here; `factor` has one column for each of them and
    then one a target. RᵀR holds all inner products, and R alone keeps their full precision.
    `left_out` counts rows at kinks of a regularizer (θ = 0 under l1), which are in no equation.
    `floor` is the norm of a target that would be rounding alone.
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
    """Equations design · λ = target from one or many points, whatever wrote them.

    Kept as blocks of a few dozen numbers each, whatever the parameter count: stacking, fits by
    layer and saving all work on those.
    """

    families: tuple[Family, ...]
    names: tuple[str, ...]
    targets: int
    """Target columns: independent groups of draws, or one."""
    blocks: tuple[Block, ...]
    sources: tuple[Source, ...]

    @property
    def rows(self) -> int:
        """How many equations there are."""
        return sum(block.rows for block in self.blocks)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have equations, in the model's order."""
        return tuple(dict.fromkeys(block.layer for block in self.blocks))

    @property
    def floor(self) -> float:
        """Norm of a target that would be rounding alone."""
        return sum(block.floor**2 for block in self.blocks) ** 0.5

    def factor(self) -> Tensor:
        """[design | targets] with its inner products, in at most as many rows as columns."""
        width = len(self.names) + self.targets
        parts = [_widen(block, len(self.names), width) for block in self.blocks]
        return triangular_factor(torch.cat([torch.zeros(0, width, dtype=torch.float64), *parts]))

    def layer(self, label: str) -> "Equations":
        """The equations of one layer, without the columns that vanish there."""
        if label not in self.layers:
            raise InputError(f"no layer {label!r}: there are {', '.join(self.layers)}.")
        blocks = tuple(block for block in self.blocks if block.layer == label)
        sources = tuple(replace(source, layer=label) for source in self.sources)
        part = replace(self, blocks=blocks, sources=sources)
        norms = part.factor()[:, : len(self.names)].norm(dim=0)
        return part.select_columns([j for j, length in enumerate(norms.tolist()) if length > 0])

    def step(self, source: int, step: int) -> "Equations":
        """The equations of one step of a trajectory (or of one endpoint: step 0)."""
        blocks = tuple(b for b in self.blocks if (b.source, b.step) == (source, step))
        return replace(self, blocks=blocks)

    def select_columns(self, columns: Sequence[int]) -> "Equations":
        """The same equations with some of the columns; the rest is left unexplained."""
        place = {column: position for position, column in enumerate(columns)}
        blocks = []
        for block in self.blocks:
            kept = [i for i, column in enumerate(block.columns) if column in place]
            ends = range(len(block.columns), block.factor.shape[1])
            factor = triangular_factor(block.factor[:, [*kept, *ends]])
            moved = tuple(place[block.columns[i]] for i in kept)
            blocks.append(replace(block, columns=moved, factor=factor))
        return replace(
            self,
            families=tuple(_kept_families(self.families, place)),
            names=tuple(self.names[column] for column in columns),
            blocks=tuple(blocks),
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
        from safetensors.torch import save

        path = Path(path)
        head = {
            "families": self.families,
            "names": self.names,
            "targets": self.targets,
            "sources": [asdict(source) for source in self.sources],
            "blocks": [
                {k: v for k, v in vars(block).items() if k != "factor"} for block in self.blocks
            ],
        }
        factors = {str(i): block.factor.contiguous() for i, block in enumerate(self.blocks)}
        content = save(factors, metadata={"format": FORMAT, "head": json.dumps(head)})
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise InputError(
                f"equations cannot be written to {path}: {error}. Pass a path in a folder that "
                "exists and can be written to."
            ) from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Equations":
        """Read equations that `save` wrote."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                factors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 # the file is no mapping
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{path} holds no equations that can be read: {error}. Pass a file that "
                "Equations.save wrote."
            ) from error
        if metadata.get("format") not in (FORMAT, EARLIER):
            raise InputError(
                f"{path} was not written by Equations.save: its format is "
                f"{metadata.get('format')!r}, not {FORMAT!r}."
            )
        head = json.loads(metadata["head"])
        blocks = (
            Block(**{**block, "columns": tuple(block["columns"])}, factor=factors[str(i)])
            for i, block in enumerate(head["blocks"])
        )
        return Equations(
            families=tuple(Family(*family) for family in head["families"]),
            names=tuple(head["names"]),
            targets=head["targets"],
            blocks=tuple(blocks),
            sources=tuple(_source(source, metadata["format"]) for source in head["sources"]),
        )


def stack(equations: Iterable[Equations]) -> Equations:
    """Many endpoints, replicates or steps as one system with one shared λ."""
    if isinstance(equations, Equations) or not isinstance(equations, Iterable):
        raise InputError(
            f"stack was given a {type(equations).__name__}: pass a list of equations, as in "
            "tacit.stack([first, second])."
        )
    parts = list(equations)
    if not parts:
        raise InputError("stack was given no equations: pass at least one.")
    for part in parts:
        if not isinstance(part, Equations):
            raise InputError(
                f"stack was given a {type(part).__name__} among the equations: pass what "
                "endpoint_equations, difference_equations or trajectory_equations return."
            )
    first = parts[0]
    blocks: list[Block] = []
    sources: list[Source] = []
    for part in parts:
        if (part.names, part.targets) != (first.names, first.targets):
            raise InputError(
                f"equations in {part.names} with {part.targets} target columns cannot be stacked "
                f"on equations in {first.names} with {first.targets}: write them all with the "
                "same regularizers and groups."
            )
        blocks += [replace(block, source=block.source + len(sources)) for block in part.blocks]
        sources += part.sources
    return replace(first, blocks=tuple(blocks), sources=tuple(sources))


def triangular_factor(rows: Tensor) -> Tensor:
    """R of a QR factorisation: the same inner products in at most as many rows as columns."""
    return torch.linalg.qr(rows, mode="r").R if rows.shape[0] > 1 else rows


def _source(told: dict[str, Any], written: str) -> Source:
    """A source from a file; one step of an earlier file's trajectory was an epoch."""
    if written == EARLIER:
        told = {**told, "epoch": told["mode"] == "trajectory" and told["steps"] == 1}
    return Source(**told)


def _widen(block: Block, count: int, width: int) -> Tensor:
    wide = torch.zeros(len(block.factor), width, dtype=torch.float64)
    wide[:, [*block.columns, *range(count, width)]] = block.factor
    return wide


def _kept_families(families: tuple[Family, ...], place: dict[int, int]) -> Iterable[Family]:
    start = 0
    for family in families:
        size = sum(column in place for column in range(start, start + family.size))
        if size:
            whole = size == family.size or family.kind not in ("diagonal", "symmetric")
            yield Family(family.name, family.kind if whole else "", size)
        start += family.size
