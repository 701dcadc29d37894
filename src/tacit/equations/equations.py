"""Linear equations in the strengths, design · λ = target, stored as small triangular factors.

Signs and scale, once: ∇L + Σ λ_k ∇R_k = 0, L the mean over examples, R a sum over parameters.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from tacit.equations.factors import triangular_factor
from tacit.equations.files import EQUATIONS, read_file, write_file
from tacit.equations.noise import (
    Scatter,
    check_groups,
    check_scatter,
    correct_factor,
    select_scatter,
    sum_scatter,
)
from tacit.equations.sources import Family, Source
from tacit.errors import InputError, check_type
from tacit.plain import check_plain, parse_json
from tacit.regularizers.family import FamilyKind, Shape

if TYPE_CHECKING:
    from tacit.equations.target import Origin

SMALLEST = 1e-140
"""Columns below this are not fitted: the squares of such numbers are zero in float64."""
MAX_NUMBERS = 2**27
"""Numbers (1 GiB) that a file may always need in memory; above, at most 100 times what it holds."""


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
    means: tuple[Block, ...] = ()
    """For epochs of a run: √m times the mean of [design | target] over every second of them, m in
    all, by layer. Products of different epochs, which have no noise on average, follow from it. Two
    in sequence share the weights between them, so that their displacements' noise is correlated."""

    alternatives: tuple[Block, ...] = ()
    """Where something is left to explain: the same equations with the columns of other families
    after the candidates', in one block for weights and one for biases; see `write_alternatives`."""
    other_families: tuple[str, ...] = ()
    """The names of those further columns."""

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
        """The factor of [design | targets], at most as many rows as columns.

        Its products are those of the equations, without the noise of columns from random probes.
        """
        factor, scatter = self.noisy_factor(), self.scatter()
        if scatter is None:
            return factor
        return correct_factor(factor, len(self.names), scatter.noisy, scatter.noise)

    def scatter(self) -> Scatter | None:
        """How the groups of random columns scatter; None where no column is random."""
        return sum_scatter(self.blocks, len(self.names), self.targets)

    def noisy_factor(self) -> Tensor:
        """The triangular factor of [design | targets], with the noise of its columns."""
        width = len(self.names) + self.targets
        factors: dict[tuple[int, ...], list[Tensor]] = {}
        for block in self.blocks:
            factors.setdefault(block.columns, []).append(block.factor)
        rows = [_widen(columns, torch.cat(f), width) for columns, f in factors.items()]
        return triangular_factor(torch.cat([torch.zeros(0, width, dtype=torch.float64), *rows]))

    def layer_factors(self) -> Tensor:
        """The factor of every layer, filled up with rows of zeros: (layers, width, width)."""
        width, noisy = len(self.names) + self.targets, any(block.noisy for block in self.blocks)
        members: dict[str, list[Block]] = {}
        for block in self.blocks:
            members.setdefault(block.layer, []).append(block)
        factors = torch.zeros(len(members), width, width, dtype=torch.float64)
        for factor, blocks in zip(factors, members.values(), strict=True):
            if noisy:
                rows = replace(self, blocks=tuple(blocks)).factor()
            else:
                rows = torch.cat([_widen(b.columns, b.factor, width) for b in blocks])
                rows = rows if len(rows) <= width else triangular_factor(rows)
            factor[: len(rows)] = rows
        return factors

    def layer(self, label: str) -> "Equations":
        """The equations of one layer, without the columns that are zero there."""
        if label not in self.layers:
            raise InputError(f"no layer {label!r}: there are {', '.join(self.layers)}.")
        blocks = tuple(block for block in self.blocks if block.layer == label)
        # Weights between knots were counted over all layers.
        sources = tuple(replace(source, layer=label, counts={}) for source in self.sources)
        means = tuple(block for block in self.means if block.layer == label)
        equations = replace(self, blocks=blocks, sources=sources, origin=None, means=means)
        norms = equations.noisy_factor()[:, : len(self.names)].norm(dim=0)
        return equations.select_columns((norms > SMALLEST).nonzero()[:, 0].tolist())

    def steps(self, source: int = 0, *, size: int = 1) -> list["Equations"]:
        """The equations of every `size` successive steps of a trajectory, in order.

        An endpoint has one step. Steps that do not fill a piece are left out at the end.
        """
        blocks: dict[int, list[Block]] = {}
        for block in self.blocks:
            if block.source == source:
                piece, step = divmod(block.step, size)
                blocks.setdefault(piece, []).append(replace(block, source=0, step=step))
        whole = self.sources[source]
        part = replace(self, origin=None, means=(), alternatives=(), other_families=())
        return [
            replace(part, blocks=tuple(blocks[piece]), sources=(_piece(whole, piece, size),))
            for piece in sorted(blocks)
            if (piece + 1) * size <= whole.steps
        ]

    def select_columns(self, columns: Sequence[int]) -> "Equations":
        """The same equations with only these columns, in this order."""
        position = {column: i for i, column in enumerate(columns)}
        return replace(
            self,
            families=tuple(_select_families(self.families, position)),
            names=tuple(self.names[column] for column in columns),
            blocks=tuple(_select_block(block, position) for block in self.blocks),
            origin=None,
            means=tuple(_select_block(block, position) for block in self.means),
            alternatives=(),
            other_families=(),
        )

    def bounded(self, *, nonnegative: bool = False) -> Tensor:
        """Which strengths are fitted under λ ≥ 0: all, or those that a convex shape needs."""
        if nonnegative:
            return torch.ones(len(self.names), dtype=torch.bool)
        marks = [m for f in self.families for m in (f.bounded or (False,) * f.size)]
        return torch.tensor(marks, dtype=torch.bool)

    def matrices(self, strengths: Sequence[float]) -> Iterator[tuple[str, Sequence[float]]]:
        """Kind and coefficients of every diagonal or symmetric family among the strengths."""
        start = 0
        for family in self.families:
            if family.kind in ("diagonal", "symmetric"):
                yield family.kind, strengths[start : start + family.size]
            start += family.size

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the equations (safetensors): they are the costly part, and refitting is free."""
        write_file(path, *self._content(), EQUATIONS)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Equations":
        """Read equations that `save` wrote; a file that is damaged or made up is refused."""
        try:
            return _checked(*read_file(path, EQUATIONS))
        except InputError:
            raise
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is damaged: {error}. Write the equations again.") from error

    def state_dict(self) -> dict[str, Any]:
        """What `save` writes, as a text and tensors that fit into a checkpoint."""
        header, tensors = self._content()
        return {"format": EQUATIONS, "head": json.dumps(header), "tensors": tensors}

    @staticmethod
    def from_state_dict(state: Mapping[str, Any]) -> "Equations":
        """The equations of a `state_dict`."""
        try:
            if state["format"] != EQUATIONS:
                raise ValueError(f"its format is {state['format']!r}, not {EQUATIONS!r}")
            return _checked(parse_json(state["head"]), [t.cpu() for t in state["tensors"]])
        except (ValueError, RecursionError) as error:
            raise InputError(f"the state of equations is damaged: {error}.") from error

    def _content(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The plain values, and the factors of all blocks."""
        header = {
            "families": [asdict(family) for family in self.families],
            "names": self.names,
            "targets": self.targets,
            "sources": [asdict(source) for source in self.sources],
            "blocks": [_without_factor(block) for block in self.blocks],
            "means": [_without_factor(block) for block in self.means],
            "alternatives": [_without_factor(block) for block in self.alternatives],
            "other_families": self.other_families,
        }
        blocks = (*self.blocks, *self.means, *self.alternatives)
        scatters = [block.scatter for block in blocks if block.scatter is not None]
        return header, [*(block.factor for block in blocks), *scatters]


def _checked(header: dict[str, Any], factors: list[Tensor]) -> Equations:
    """The equations of this content; a ValueError says what no writer writes."""
    if any(factor.dtype != torch.float64 for factor in factors):
        raise ValueError("its matrices are not in float64")
    equations = _from_header(header, factors)
    _check_columns(equations)
    _check_blocks(equations)
    _check_means(equations)
    _check_alternatives(equations)
    return equations


def _piece(source: Source, piece: int, size: int) -> Source:
    """The source of every so many successive steps of a trajectory."""
    sizes = source.step_sizes[piece * size : (piece + 1) * size]
    return replace(source, steps=size, step_sizes=sizes)


@dataclass(frozen=True)
class _Header:
    """The plain values of a file, beside the factors of its blocks."""

    families: tuple[Family, ...]
    names: tuple[str, ...]
    targets: int
    blocks: tuple[Block, ...]
    sources: tuple[Source, ...]
    means: tuple[Block, ...]
    alternatives: tuple[Block, ...] = ()
    other_families: tuple[str, ...] = ()


def _from_header(header: dict[str, Any], factors: list[Tensor]) -> Equations:
    """The equations of a file, with every value of its type."""
    kinds = ("blocks", "means", "alternatives")
    parts = [check_plain(tuple[dict[str, Any], ...], header.get(k), k) for k in kinds]
    count, noisy = sum(map(len, parts)), sum(bool(b.get("noisy")) for part in parts for b in part)
    if count + noisy != len(factors):
        raise ValueError(f"it has {count} blocks and {len(factors) - noisy} matrices")
    each, scatters = iter(factors), iter(factors[count:])
    whole = {
        kind: [
            {"factor": next(each), "scatter": next(scatters) if b.get("noisy") else None, **b}
            for b in blocks
        ]
        for kind, blocks in zip(kinds, parts, strict=True)
    }
    return Equations(**vars(check_plain(_Header, {**header, **whole}, "the head")))


def _check_columns(equations: Equations) -> None:
    """Refuse columns that no writer writes: a ValueError says what does not fit together."""
    names = equations.names
    if not (names and equations.targets and equations.sources and equations.blocks):
        raise ValueError("it has no columns, targets, sources or blocks")
    if len({*names}) != len(names) or not all(names):
        raise ValueError("columns have the same name, or none")
    if sum(family.size for family in equations.families) != len(names):
        raise ValueError(f"its families do not have {len(names)} columns")
    for family in equations.families:
        _check_family(family)
    counts = {f.name: f.size + 1 for f in equations.families if f.shape is not None}
    for source in equations.sources:
        _check_source(source)
        if any(len(c) != counts.get(name, len(c)) for name, c in source.counts.items()):
            raise ValueError("a source counts weights between other knots")


def _check_blocks(equations: Equations) -> None:
    """Refuse blocks that do not fit together, or whose joint factor needs too much memory."""
    blocks = (*equations.blocks, *equations.means)
    for block in blocks:
        _check_block(block, len(equations.names), equations.targets, len(equations.sources))
    check_groups(blocks)
    width = len(equations.names) + equations.targets
    stored = sum(block.factor.numel() for block in blocks)
    joined = width * (width + sum(len(block.factor) for block in blocks))
    if noisy := [block.scatter for block in blocks if block.scatter is not None]:
        joined += (width + sum(scatter.shape[1] for scatter in noisy)) ** 2
    if joined > max(MAX_NUMBERS, 100 * stored):
        raise ValueError(f"{stored} numbers would need {joined / 2**27:.3g} GiB of memory")


def _check_means(equations: Equations) -> None:
    """Refuse means over points that are not there."""
    points = {(block.layer, block.source, block.step) for block in equations.blocks}
    for mean in equations.means:
        last = 2 * (mean.points - 1)
        epoch = mean.source < len(equations.sources) and equations.sources[mean.source].epoch
        end = (mean.source + last, 0) if epoch else (mean.source, mean.step + last)
        if mean.points < 2 or (mean.layer, *end) not in points:
            raise ValueError(f"a mean over {mean.points} points has not all of them")


def _check_alternatives(equations: Equations) -> None:
    """Refuse blocks of other families that do not have all columns."""
    columns = tuple(range(len(equations.names) + len(equations.other_families)))
    for block in equations.alternatives:
        _check_block(block, len(columns), equations.targets, len(equations.sources))
        if block.columns != columns or not equations.other_families:
            raise ValueError(f"alternatives have {len(block.columns)} columns, not {len(columns)}")


def _check_family(family: Family) -> None:
    triangle = math.isqrt(2 * family.size)
    whole = family.kind != "symmetric" or triangle * (triangle + 1) == 2 * family.size
    if family.kind not in get_args(FamilyKind) or not family.size or not whole:
        raise ValueError(f"a family of {family.size} columns is {family.kind[:40]!r}")
    if len(family.bounded) not in (0, family.size):
        raise ValueError(f"{len(family.bounded)} of {family.size} columns have bounds")
    if family.shape is not None:
        _check_shape(family, family.shape)


def _check_shape(family: Family, shape: Shape) -> None:
    knots, marks = shape.knots, family.bounded or (False,) * family.size
    rising = all(a < b for a, b in pairwise(knots)) and not (
        shape.even and min(knots, default=0.0) < 0
    )
    known = shape.of in ("weights", "singular values") and not shape.counts
    if len(knots) != family.size or not rising or not known or shape.bounded != marks:
        raise ValueError(f"{len(knots)} knots of {family.size} columns do not fit them")


def _check_source(source: Source) -> None:
    if source.mode not in ("endpoint", "difference", "trajectory", "accumulated"):
        raise ValueError(f"mode of a source is {source.mode[:40]!r}")
    norms = {k: v for k, v in vars(source).items() if isinstance(v, float) and k != "loss_value"}
    if negative := [k for k, v in norms.items() if v < 0]:
        raise ValueError(f"{', '.join(negative)} of a source is negative")


def _check_block(block: Block, columns: int, targets: int, sources: int) -> None:
    shape, where = tuple(block.factor.shape), f"a block of layer {block.layer[:40]!r}"
    if len({*block.columns}) != len(block.columns) or max(block.columns, default=0) >= columns:
        raise ValueError(f"{where} has columns that are repeated or missing")
    width = len(block.columns) + targets
    if len(shape) != 2 or shape[1] != width or shape[0] > min(width, block.rows):
        raise ValueError(f"{where} has {block.rows} rows, {width} columns and a matrix of {shape}")
    if block.source >= sources:
        raise ValueError(f"{where} is of source {block.source}, and there are {sources}")
    if block.floor < 0 or not torch.isfinite(block.factor).all():
        raise ValueError(f"{where} has a negative floor, or numbers that are not finite")
    if block.noisy or block.scatter is not None:
        check_scatter(block, width, where)


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
    means: list[Block] = []
    sources: list[Source] = []
    for part in parts:
        _check_knots(part, first)
        if (part.names, part.targets) != (first.names, first.targets):
            raise InputError(
                f"equations in {part.names} with {part.targets} target columns do not stack on "
                f"{first.names} with {first.targets}: use the same regularizers and groups."
            )
        for family, other in zip(part.families, first.families, strict=False):
            if family != other:
                raise InputError(
                    f"{family.describe()} does not stack on {other.describe()}: one strength "
                    "cannot belong to both. Give them different names, and fit each of its own."
                )
        blocks += [replace(block, source=block.source + len(sources)) for block in part.blocks]
        means += [replace(block, source=block.source + len(sources)) for block in part.means]
        sources += part.sources
    check_groups(blocks)
    others, alternatives = _stack_alternatives(parts)
    return replace(
        first,
        blocks=tuple(blocks),
        sources=tuple(sources),
        origin=first.origin if len(parts) == 1 else None,
        means=tuple(means),
        alternatives=alternatives,
        other_families=others,
    )


def _check_knots(part: Equations, first: Equations) -> None:
    """Refuse shapes with other knots, whose strengths belong to other places."""
    for family, other in zip(part.families, first.families, strict=False):
        if family.name == other.name and family.shape != other.shape:
            raise InputError(
                f"{family.describe()} does not stack on {other.describe()}: strengths belong to "
                "knots. Write all equations with the same spline object, or pass the same knots, "
                "as in spline(knots=fit.curve('spline').knots)."
            )


def _stack_alternatives(
    parts: Sequence[Equations],
) -> tuple[tuple[str, ...], tuple[Block, ...]]:
    """The other families that all parts have which have any, and their equations."""
    families = [part.other_families for part in parts if part.other_families] or [()]
    others = [n for n in families[0] if all(n in names for names in families)]
    blocks, sources = [], 0
    for part in parts if others else ():
        names = (*part.names, *part.other_families)
        wanted = (*part.names, *others)
        for block in part.alternatives:
            if names != wanted:
                block = _select_block(block, {names.index(n): i for i, n in enumerate(wanted)})
            blocks.append(replace(block, source=block.source + sources))
        sources += len(part.sources)
    return tuple(others), tuple(blocks)


def _widen(columns: tuple[int, ...], factor: Tensor, width: int) -> Tensor:
    """[design | targets] of these columns with one column per strength, zero for the others."""
    targets = factor.shape[1] - len(columns)
    wide = torch.zeros(len(factor), width, dtype=torch.float64)
    wide[:, [*columns, *range(width - targets, width)]] = factor
    return wide


def _select_block(block: Block, position: dict[int, int]) -> Block:
    """The block with only these columns, at these positions."""
    selected = [i for i, column in enumerate(block.columns) if column in position]
    targets = range(len(block.columns), block.factor.shape[1])
    factor = triangular_factor(block.factor[:, [*selected, *targets]])
    columns = tuple(position[block.columns[i]] for i in selected)
    places, scatter = select_scatter(block, selected)
    noisy = tuple(columns[place] for place in places)
    return replace(block, columns=columns, factor=factor, noisy=noisy, scatter=scatter)


def _without_factor(block: Block) -> dict[str, Any]:
    return {k: v for k, v in vars(block).items() if k not in ("factor", "scatter")}


def _select_families(families: tuple[Family, ...], position: dict[int, int]) -> Iterable[Family]:
    start = 0
    for family in families:
        size = sum(column in position for column in range(start, start + family.size))
        if size:
            bounded = [m for i, m in enumerate(family.bounded) if start + i in position]
            family_part = replace(family, size=size, bounded=tuple(bounded))
            if size < family.size:  # a part of a matrix or of a curve is none
                kind = "" if family.kind in ("diagonal", "symmetric") else family.kind
                family_part = replace(family_part, kind=kind, shape=None)
            yield family_part
        start += family.size
