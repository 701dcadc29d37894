"""From gradients to blocks: rows of [design | targets] are read in slices and factored away."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.equations.equations import Block, Family, triangular_factor
from tacit.errors import InputError
from tacit.objective.objective import Objective
from tacit.objective.params import Params, layer_of, norm, shorten, square_norm, to_float64
from tacit.regularizers import Columns, Regularizer, join

CHUNK = 2**21
"""Entries of [design | targets] held at once (16 MiB)."""


class BoundCandidates(NamedTuple):
    """Regularizers at a point: columns to estimate, and known columns with their strengths."""

    families: tuple[Family, ...]
    columns: Columns
    known: list[tuple[float, Columns]]


@dataclass(frozen=True, eq=False)
class Candidates:
    """The regularizers of a call, checked: those to estimate, and those that are known."""

    estimated: tuple[Regularizer, ...]
    known: dict[Regularizer, float]

    def bind(self, params: Params) -> BoundCandidates:
        """All columns at these parameters."""
        parts = [r.bind(params) for r in self.estimated]
        families = (
            Family(r.name, r.kind, len(part.names))
            for r, part in zip(self.estimated, parts, strict=True)
        )
        columns = join(parts)
        twice = [name for name, times in Counter(columns.names).items() if times > 1]
        if twice:
            raise InputError(
                f"several regularizers are named {shorten(twice)}: give each its own with name=, "
                "as in tacit.l2(scope='*.bias', name='l2 of biases')."
            )
        known = [(strength, r.bind(params)) for r, strength in self.known.items()]
        again = [n for n, times in Counter(r.name for r in self.known).items() if times > 1]
        if again:
            raise InputError(
                f"several known penalties are named {shorten(again)}: give each its own with name=."
            )
        for _, column in known:
            if len(column.names) != 1:
                raise InputError(
                    f"known penalty {column.names[0]!r} has {len(column.names)} coefficients: "
                    "known= takes penalties of one strength."
                )
        return BoundCandidates(tuple(families), columns, known)


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
    for given in (*regularizers, *(known or {})):
        if not isinstance(given, Regularizer):
            called = " Call it, as in tacit.l2()." if callable(given) else ""
            raise InputError(
                f"a regularizer is a {type(given).__name__}: pass what tacit.l2(), "
                f"tacit.regularizer(name, function) and the like return.{called}"
            )
    for given, strength in (known or {}).items():
        number = isinstance(strength, Real) and not isinstance(strength, bool)
        if not number or not math.isfinite(strength):
            raise InputError(
                f"the known strength of {given.name!r} is {strength!r}: pass a finite number "
                "(for torch's weight_decay w it is {tacit.l2(): w / 2})."
            )
    return Candidates(tuple(regularizers), dict(known or {}))


def write_blocks(
    params: Params,
    bound: BoundCandidates,
    targets: Sequence[Params],
    *,
    floors: Mapping[str, float],
    rows: Sequence[str],
    step: int = 0,
) -> list[Block]:
    """One block a layer.

    Never holds the design: a slice of rows at a time becomes part of the layer's factor.
    """
    blocks = []
    layers: dict[str, list[str]] = {}
    for name in rows:
        layers.setdefault(layer_of(name), []).append(name)
    for layer, names in layers.items():
        active = sorted({c for name in names for c in bound.columns.active.get(name, ())})
        width = len(active) + len(targets)
        factor, kept, left_out = torch.zeros(0, width, dtype=torch.float64), 0, 0
        for name in names:
            size, height = params[name].numel(), max(1, CHUNK // width)
            for start in range(0, size, height):
                part = slice(start, min(start + height, size))
                matrix, gone = _rows(name, part, bound, active, targets)
                factor = triangular_factor(torch.cat([factor.to(matrix), matrix]))
                kept, left_out = kept + len(matrix), left_out + gone
        if not torch.isfinite(factor).all():
            raise InputError(
                f"the equations of layer {layer} overflow: a regularizer's gradient or a target "
                "is not finite there. Leave that layer out with rows=."
            )
        floor = sum(floors[name] ** 2 for name in names) ** 0.5
        blocks.append(Block(layer, tuple(active), factor.cpu(), kept, left_out, floor, step=step))
    return blocks


def _rows(
    name: str, part: slice, bound: BoundCandidates, active: list[int], targets: Sequence[Params]
) -> tuple[Tensor, int]:
    """[design | targets] on a slice of one tensor, and how many rows left it at kinks."""
    target = torch.stack([to_float64(t[name].flatten()[part]) for t in targets], dim=1)
    for strength, known in bound.known:
        if name in known.active:
            target = target - strength * known.rows(name, part)
    matrix = target.new_zeros(len(target), len(active) + len(targets))
    matrix[:, len(active) :] = target
    if name in bound.columns.active:
        place = {column: position for position, column in enumerate(active)}
        own = [place[column] for column in bound.columns.active[name]]
        matrix[:, own] = bound.columns.rows(name, part)
    kinks = [
        mask.to(matrix.device)
        for columns in (bound.columns, *(known for _, known in bound.known))
        if name in columns.active and (mask := columns.kinks(name, part)) is not None
    ]
    if not kinks:
        return matrix, 0
    gone = torch.stack(kinks).any(0)
    return matrix[~gone], int(gone.sum())


def point_of(objective: Objective, params: Mapping[str, Tensor] | None) -> Params:
    check_objective(objective)
    return objective.point(params)


def check_objective(given: Objective) -> None:
    if not isinstance(given, Objective):
        raise InputError(
            f"an objective is a {type(given).__name__}: pass tacit.Objective(model, loss, data)."
        )


def rounding_norms(objective: Objective, params: Params) -> dict[str, float]:
    return {n: math.sqrt(square_norm(t)) for n, t in objective.rounding(params).items()}


def describe(
    objective: Objective, params: Params, chosen: Sequence[str], candidates: Candidates
) -> dict[str, Any]:
    """What a source says of the model, the data and the known penalties."""
    model = objective.model
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    return {
        "loss": objective.loss_name,
        "examples": objective.count,
        "parameters": sum(params[n].numel() for n in chosen),
        "tensors": len(chosen),
        "frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "tied": len(names) - len(list(model.parameters())),
        "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in params.values()})),
        "parameter_norm": norm(params),
        "known": {r.name: float(strength) for r, strength in candidates.known.items()},
    }
