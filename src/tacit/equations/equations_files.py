"""The content of equations as plain values and tensors, for files and checkpoints."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from tacit.equations.blocks import Block
from tacit.equations.noise import check_groups, check_scatter
from tacit.equations.sources import Family, Source
from tacit.plain import check_plain
from tacit.regularizers.family import FamilyKind, Shape

if TYPE_CHECKING:
    from tacit.equations.equations import Equations

MAX_NUMBERS = 2**27
"""Numbers (1 GiB) that a file may always need in memory; above, at most 100 times what it holds."""


def equations_content(equations: "Equations") -> tuple[dict[str, Any], list[Tensor]]:
    """The plain values, and the factors of all blocks."""
    header = {
        "families": [asdict(family) for family in equations.families],
        "names": equations.names,
        "targets": equations.targets,
        "sources": [asdict(source) for source in equations.sources],
        "blocks": [_without_factor(block) for block in equations.blocks],
        "means": [_without_factor(block) for block in equations.means],
        "alternatives": [_without_factor(block) for block in equations.alternatives],
        "other_families": equations.other_families,
    }
    blocks = (*equations.blocks, *equations.means, *equations.alternatives)
    scatters = [block.scatter for block in blocks if block.scatter is not None]
    return header, [*(block.factor for block in blocks), *scatters]


def _without_factor(block: Block) -> dict[str, Any]:
    return {k: v for k, v in vars(block).items() if k not in ("factor", "scatter")}


def read_equations(header: dict[str, Any], factors: Sequence[Tensor]) -> "Content":
    """What `equations_content` gave; a ValueError says what it cannot have given."""
    if any(factor.dtype != torch.float64 for factor in factors):
        raise ValueError("its matrices are not in float64")
    content = _from_header(header, factors)
    _check_columns(content)
    _check_blocks(content)
    _check_means(content)
    _check_alternatives(content)
    return content


@dataclass(frozen=True)
class Content:
    """What equations consist of, but for what they were written from."""

    families: tuple[Family, ...]
    names: tuple[str, ...]
    targets: int
    blocks: tuple[Block, ...]
    sources: tuple[Source, ...]
    means: tuple[Block, ...]
    alternatives: tuple[Block, ...] = ()
    other_families: tuple[str, ...] = ()


def _from_header(header: dict[str, Any], factors: Sequence[Tensor]) -> Content:
    """The content of a file, with every value of its type."""
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
    return check_plain(Content, {**header, **whole}, "the head")


def _check_columns(content: Content) -> None:
    """Refuse columns that no writer writes: a ValueError says what does not fit together."""
    names = content.names
    if not (names and content.targets and content.sources and content.blocks):
        raise ValueError("it has no columns, targets, sources or blocks")
    if len({*names}) != len(names) or not all(names):
        raise ValueError("columns have the same name, or none")
    if sum(family.size for family in content.families) != len(names):
        raise ValueError(f"its families do not have {len(names)} columns")
    for family in content.families:
        _check_family(family)
    counts = {f.name: f.size + 1 for f in content.families if f.shape is not None}
    for source in content.sources:
        _check_source(source)
        if any(len(c) != counts.get(name, len(c)) for name, c in source.counts.items()):
            raise ValueError("a source counts weights between other knots")


def _check_blocks(content: Content) -> None:
    """Refuse blocks that do not fit together, or whose joint factor needs too much memory."""
    blocks = (*content.blocks, *content.means)
    for block in blocks:
        _check_block(block, len(content.names), content.targets, len(content.sources))
    check_groups(blocks)
    width = len(content.names) + content.targets
    stored = sum(block.factor.numel() for block in blocks)
    joined = width * (width + sum(len(block.factor) for block in blocks))
    if noisy := [block.scatter for block in blocks if block.scatter is not None]:
        joined += (width + sum(scatter.shape[1] for scatter in noisy)) ** 2
    if joined > max(MAX_NUMBERS, 100 * stored):
        raise ValueError(f"{stored} numbers would need {joined / 2**27:.3g} GiB of memory")


def _check_means(content: Content) -> None:
    """Refuse means over points that are not there."""
    points = {(block.layer, block.source, block.step) for block in content.blocks}
    for mean in content.means:
        last = 2 * (mean.points - 1)
        epoch = mean.source < len(content.sources) and content.sources[mean.source].epoch
        end = (mean.source + last, 0) if epoch else (mean.source, mean.step + last)
        if mean.points < 2 or (mean.layer, *end) not in points:
            raise ValueError(f"a mean over {mean.points} points has not all of them")


def _check_alternatives(content: Content) -> None:
    """Refuse blocks of other families that do not have all columns."""
    columns = tuple(range(len(content.names) + len(content.other_families)))
    for block in content.alternatives:
        _check_block(block, len(columns), content.targets, len(content.sources))
        if block.columns != columns or not content.other_families:
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
