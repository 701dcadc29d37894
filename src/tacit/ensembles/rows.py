"""Columns of regularizers for all members, and their batched triangular factors."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.ensembles.layout import per_member
from tacit.ensembles.members import Ensemble
from tacit.equations.equations import Block, triangular_factor
from tacit.equations.rows import BoundCandidates, Candidates
from tacit.objective.params import Params, layer_of
from tacit.regularizers import Regularizer


class Columns(NamedTuple):
    """A family's columns on one tensor, (members, rows, columns), and rows at kinks."""

    values: Tensor
    kinks: Tensor


def columns(regularizer: Regularizer, params: Params, name: str) -> Columns | None:
    """∇R_j of every member on one tensor, in float64; None where the family does not cover it.

    Families that treat each entry alone are evaluated on the stacked tensor as it is; others
    member by member.
    """
    members = len(params[name])
    if regularizer.entry is not None:
        return _read(regularizer, params, name, members)
    each = [
        _read(regularizer, {n: p[m] for n, p in params.items()}, name, 1) for m in range(members)
    ]
    found = [part for part in each if part is not None]
    return Columns(*map(torch.cat, zip(*found, strict=True))) if found else None


def _read(regularizer: Regularizer, params: Params, name: str, members: int) -> Columns | None:
    bound = regularizer.bind(params)
    if name not in bound.active:
        return None
    whole = slice(0, params[name].numel())
    values, kinks = bound.rows(name, whole), bound.kinks(name, whole)
    if kinks is None:
        kinks = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    return Columns(values.reshape(members, -1, values.shape[1]), kinks.reshape(members, -1))


def blocks(
    ensemble: Ensemble,
    candidates: Candidates,
    targets: Sequence[Params],
    *,
    kinks: Params,
    floors: Params,
    given: Mapping[Regularizer, Params],
) -> list[list[Block]]:
    """The equations of every member, one block a layer, as `tacit.assembly.assemble` makes them.

    Args:
        ensemble: the points.
        candidates: the regularizers to estimate.
        targets: stacked targets, one a group of draws.
        kinks: rows (members, rows) that known penalties take out already.
        floors: norms, by tensor and member, of targets that would be rounding alone.
        given: columns that are known already (means over an epoch, gradients of a streamed mean),
            rather than taken at the point; of regularizers with one coefficient.
    """
    one = ensemble.member(0)

    def read(regularizer: Regularizer, name: str) -> Columns | None:
        if regularizer not in given:
            return columns(regularizer, ensemble.params, name)
        if name not in regularizer.bind(one).active:
            return None
        values = per_member(given[regularizer][name])
        return Columns(values.unsqueeze(2), torch.zeros_like(values, dtype=torch.bool))

    first = candidates.bind(ensemble.member(0))
    layers: dict[str, list[str]] = {}
    for name in ensemble.params:
        layers.setdefault(layer_of(name), []).append(name)
    every: list[list[Block]] = [[] for _ in range(len(ensemble))]
    for layer, names in layers.items():
        active = sorted({c for name in names for c in first.columns.active.get(name, ())})
        rows, gone = 0, torch.zeros(len(ensemble), dtype=torch.int64)
        width = len(active) + len(targets)
        factors = torch.zeros(len(ensemble), 0, width, dtype=torch.float64)
        for name in names:
            read_here = [read(r, name) for r in candidates.estimated]
            matrix, out = _rows(name, first, read_here, [t[name] for t in targets], active)
            out |= kinks[name]
            own = _triangles(matrix.masked_fill_(out.unsqueeze(2), 0))
            factors = _triangles(torch.cat([factors, own], 1))
            rows, gone = rows + out.shape[1], gone + out.sum(1).cpu()
        floor = torch.stack([floors[n].square() for n in names]).sum(0).sqrt()
        for m, (own, left_out) in enumerate(zip(every, gone.tolist(), strict=True)):
            kept = rows - left_out
            block = Block(layer, tuple(active), factors[m], kept, left_out, float(floor[m]))
            own.append(block)
    return every


def _rows(
    name: str,
    bound: BoundCandidates,
    found: Sequence[Columns | None],
    targets: Sequence[Tensor],
    active: list[int],
) -> tuple[Tensor, Tensor]:
    """[design | targets] of one tensor, (members, rows, columns), and which rows are at kinks.

    Rows at kinks are in no equation; as zeros they add nothing to a factor.
    """
    flat = torch.stack([per_member(target) for target in targets], dim=2)
    matrix = torch.cat([flat.new_zeros(*flat.shape[:2], len(active)), flat], dim=2)
    kinks = torch.zeros_like(flat[..., 0], dtype=torch.bool)
    own = [active.index(column) for column in bound.columns.active.get(name, ())]
    parts = [part for part in found if part is not None]
    if parts:
        matrix[..., own] = torch.cat([part.values for part in parts], dim=2)
    for part in parts:
        kinks |= part.kinks
    return matrix, kinks


def _triangles(matrix: Tensor) -> Tensor:
    """R of every member's QR factorisation, on the CPU."""
    return torch.stack([triangular_factor(own) for own in matrix]).cpu()
