"""From gradients to blocks: rows of [design | targets] are read in slices and factorised."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tacit.equations.equations import Block, Equations, Family, Source, triangular_factor
from tacit.errors import InputError
from tacit.objective.params import Params, Scope, layer_of, select, shorten, to_float64
from tacit.regularizers.family import Columns, Regularizer, join_columns

CHUNK = 2**21
"""Entries of [design | targets] in memory at once (16 MiB)."""


@dataclass(frozen=True, eq=False)
class BoundCandidates:
    """Regularizers at a point: the columns to estimate, and known columns with their strengths."""

    params: Params
    rows: tuple[str, ...]
    """Names of the parameters whose equations are written."""
    families: tuple[Family, ...]
    columns: Columns
    known: list[tuple[float, Columns]]
    known_strengths: dict[str, float]

    def describe(self) -> dict[str, Any]:
        """Facts about the rows and the known penalties, for the header of a summary."""
        return {
            "parameters": sum(self.params[name].numel() for name in self.rows),
            "tensors": len(self.rows),
            "known": self.known_strengths,
        }


@dataclass(frozen=True, eq=False)
class Candidates:
    """The regularizers of a call, checked: those to estimate, and those that are known."""

    estimated: tuple[Regularizer, ...]
    known: dict[Regularizer, float]

    def bind(self, params: Params, rows: Scope = None) -> BoundCandidates:
        """All columns at these parameters; `rows` selects whose equations are written."""
        parts = [r.bind(params) for r in self.estimated]
        families = tuple(
            Family(r.name, r.kind, len(part.names))
            for r, part in zip(self.estimated, parts, strict=True)
        )
        columns = join_columns(parts)
        if repeated := _repeated(columns.names):
            raise InputError(
                f"several regularizers are named {shorten(repeated)}: give each a name with name=, "
                "as in tacit.l2(scope='*.bias', name='l2 of biases')."
            )
        known = [(strength, r.bind(params)) for r, strength in self.known.items()]
        if repeated := _repeated([r.name for r in self.known]):
            raise InputError(
                f"several known penalties are named {shorten(repeated)}: give each a name with "
                "name=."
            )
        for _, column in known:
            if len(column.names) != 1:
                raise InputError(
                    f"known penalty {column.names[0]!r} has {len(column.names)} coefficients: "
                    "known= takes penalties of one strength."
                )
        strengths = {r.name: float(strength) for r, strength in self.known.items()}
        chosen = select(params, rows, what="rows")
        return BoundCandidates(params, chosen, families, columns, known, strengths)


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


def check_candidates(
    regularizers: Regularizer | Sequence[Regularizer], known: Mapping[Regularizer, float] | None
) -> Candidates:
    """Refuse what is not a list of regularizers, before any pass over the data."""
    if isinstance(regularizers, Regularizer):
        regularizers = [regularizers]
    if not isinstance(regularizers, Sequence) or not regularizers:
        raise InputError(
            f"regularizers is {regularizers!r}: pass at least one, as in [tacit.l2()]."
        )
    if known is not None and not isinstance(known, Mapping):
        raise InputError(
            f"known is a {type(known).__name__}: pass a dictionary from penalty to strength, as in "
            "{tacit.l2(): 5e-5}."
        )
    for candidate in (*regularizers, *(known or {})):
        if not isinstance(candidate, Regularizer):
            hint = " Call it, as in tacit.l2()." if callable(candidate) else ""
            raise InputError(
                f"a regularizer is a {type(candidate).__name__}: pass what tacit.l2(), "
                f"tacit.regularizer(name, function) and similar functions return.{hint}"
            )
    for penalty, strength in (known or {}).items():
        is_number = isinstance(strength, Real) and not isinstance(strength, bool)
        if not is_number or not math.isfinite(strength):
            raise InputError(
                f"the known strength of {penalty.name!r} is {strength!r}: pass a finite number "
                "(for torch's weight_decay w it is {tacit.l2(): w / 2})."
            )
    return Candidates(tuple(regularizers), dict(known or {}))


def write_equations(
    bound: BoundCandidates,
    targets: Sequence[Params],
    *,
    floors: Mapping[str, float],
    source: Source,
) -> Equations:
    """The equations of one point, with one target column per group of draws."""
    blocks = tuple(write_blocks(bound, targets, floors=floors))
    return Equations(bound.families, bound.columns.names, len(targets), blocks, (source,))


def write_blocks(
    bound: BoundCandidates,
    targets: Sequence[Params],
    *,
    floors: Mapping[str, float],
    step: int = 0,
) -> list[Block]:
    """One block per layer.

    The design is never in memory whole: each slice of rows is merged into the layer's factor.
    """
    blocks = []
    layers: dict[str, list[str]] = {}
    for name in bound.rows:
        layers.setdefault(layer_of(name), []).append(name)
    for layer, names in layers.items():
        active = sorted({c for name in names for c in bound.columns.active.get(name, ())})
        width = len(active) + len(targets)
        factor, row_count, left_out = torch.zeros(0, width, dtype=torch.float64), 0, 0
        for name in names:
            for part in slices(bound.params[name], width):
                matrix, at_kinks = _read_rows(name, part, bound, active, targets)
                factor = triangular_factor(torch.cat([factor.to(matrix), matrix]))
                row_count, left_out = row_count + len(matrix), left_out + at_kinks
        if not torch.isfinite(factor).all():
            raise InputError(
                f"the equations of layer {layer} overflow: a regularizer's gradient or a target "
                "is not finite there. Leave that layer out with rows=."
            )
        floor = sum(floors[name] ** 2 for name in names) ** 0.5
        columns = tuple(active)
        blocks.append(Block(layer, columns, factor.cpu(), row_count, left_out, floor, step=step))
    return blocks


def slices(tensor: Tensor, width: int) -> Iterator[slice]:
    """Slices of a flattened tensor, so that `width` columns of one are at most `CHUNK` entries."""
    size, height = tensor.numel(), max(1, CHUNK // max(1, width))
    for start in range(0, size, height):
        yield slice(start, min(start + height, size))


def _read_rows(
    name: str, part: slice, bound: BoundCandidates, active: list[int], targets: Sequence[Params]
) -> tuple[Tensor, int]:
    """[design | targets] on a slice of one tensor, and how many rows were left out at kinks."""
    target = torch.stack([to_float64(t[name].flatten()[part]) for t in targets], dim=1)
    for strength, known in bound.known:
        if name in known.active:
            target = target - strength * known.rows(name, part)
    matrix = target.new_zeros(len(target), len(active) + len(targets))
    matrix[:, len(active) :] = target
    if name in bound.columns.active:
        position = {column: place for place, column in enumerate(active)}
        places = [position[column] for column in bound.columns.active[name]]
        matrix[:, places] = bound.columns.rows(name, part)
    masks = [
        mask.to(matrix.device)
        for columns in (bound.columns, *(known for _, known in bound.known))
        if name in columns.active and (mask := columns.kinks(name, part)) is not None
    ]
    if not masks:
        return matrix, 0
    at_kink = torch.stack(masks).any(0)
    return matrix[~at_kink], int(at_kink.sum())
