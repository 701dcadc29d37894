"""Rows [design | targets] of all members, and their triangular factors."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.ensembles.layout import flatten_members
from tacit.ensembles.members import Ensemble
from tacit.equations.equations import Block, triangular_factor
from tacit.equations.rows import BoundCandidates, Candidates
from tacit.objective.params import Params, layer_of
from tacit.regularizers import Regularizer


class StackedColumns(NamedTuple):
    """The columns of a family on one tensor, for all members.

    `tacit.regularizers.Columns` describes one model and is read in slices; the tensors of an
    ensemble are small, so that the columns of all members are stacked whole.
    """

    values: Tensor
    """(members, rows, columns), in float64."""
    kinks: Tensor
    """Mask (members, rows) of the rows where R is not differentiable."""


def stacked_columns(regularizer: Regularizer, params: Params, name: str) -> StackedColumns | None:
    """∇R_j of every member on one tensor; None where the family does not cover the tensor.

    Entrywise families are evaluated on the stacked tensor, others member by member.
    """
    members = len(params[name])
    if regularizer.entrywise is not None:
        return _evaluate_columns(regularizer, params, name, members)
    parts = [
        _evaluate_columns(regularizer, {n: p[m] for n, p in params.items()}, name, 1)
        for m in range(members)
    ]
    covered = [part for part in parts if part is not None]
    return StackedColumns(*map(torch.cat, zip(*covered, strict=True))) if covered else None


def _evaluate_columns(
    regularizer: Regularizer, params: Params, name: str, members: int
) -> StackedColumns | None:
    """Evaluate a family on a tensor with the entries of a number of members."""
    columns = regularizer.bind(params)
    if name not in columns.active:
        return None
    whole = slice(0, params[name].numel())
    values, kinks = columns.rows(name, whole), columns.kinks(name, whole)
    if kinks is None:
        kinks = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    return StackedColumns(values.reshape(members, -1, values.shape[1]), kinks.reshape(members, -1))


def write_member_blocks(
    ensemble: Ensemble,
    candidates: Candidates,
    targets: Sequence[Params],
    *,
    kinks: Params,
    floors: Params,
    columns: Mapping[Regularizer, Params],
) -> list[list[Block]]:
    """The equations of every member, one block per layer.

    Equivalent to `tacit.equations.rows.write_blocks` for each member.

    Args:
        ensemble: the points.
        candidates: the regularizers to estimate.
        targets: stacked targets, one per group of draws.
        kinks: masks (members, rows) of the rows that known penalties exclude.
        floors: for each tensor and member, the norm of a target that consists of rounding errors.
        columns: columns that were computed already (means over an epoch, gradients of a mean over
            the data) and replace those at the point; of regularizers with one strength.
    """
    first_member = ensemble.member(0)

    def read(regularizer: Regularizer, name: str) -> StackedColumns | None:
        if regularizer not in columns:
            return stacked_columns(regularizer, ensemble.params, name)
        if name not in regularizer.bind(first_member).active:
            return None
        values = flatten_members(columns[regularizer][name])
        return StackedColumns(values.unsqueeze(2), torch.zeros_like(values, dtype=torch.bool))

    bound = candidates.bind(first_member)
    layers: dict[str, list[str]] = {}
    for name in ensemble.params:
        layers.setdefault(layer_of(name), []).append(name)
    blocks: list[list[Block]] = [[] for _ in range(len(ensemble))]
    for layer, names in layers.items():
        active = sorted({c for name in names for c in bound.columns.active.get(name, ())})
        rows, excluded = 0, torch.zeros(len(ensemble), dtype=torch.int64)
        width = len(active) + len(targets)
        factors = torch.zeros(len(ensemble), 0, width, dtype=torch.float64)
        for name in names:
            families = [read(r, name) for r in candidates.estimated]
            tensor_targets = [target[name] for target in targets]
            matrix, mask = _design_and_targets(name, bound, families, tensor_targets, active)
            mask |= kinks[name]
            tensor_factors = _triangular_factors(matrix.masked_fill_(mask.unsqueeze(2), 0))
            factors = _triangular_factors(torch.cat([factors, tensor_factors], 1))
            rows, excluded = rows + mask.shape[1], excluded + mask.sum(1).cpu()
        floor = torch.stack([floors[n].square() for n in names]).sum(0).sqrt()
        for m, left_out in enumerate(excluded.tolist()):
            used = rows - left_out
            block = Block(layer, tuple(active), factors[m], used, left_out, float(floor[m]))
            blocks[m].append(block)
    return blocks


def _design_and_targets(
    name: str,
    bound: BoundCandidates,
    families: Sequence[StackedColumns | None],
    targets: Sequence[Tensor],
    active: list[int],
) -> tuple[Tensor, Tensor]:
    """[design | targets] of one tensor, (members, rows, columns), and a mask of rows at kinks.

    The caller sets rows at kinks to zero: a row of zeros does not change a triangular factor.
    """
    flat = torch.stack([flatten_members(target) for target in targets], dim=2)
    matrix = torch.cat([flat.new_zeros(*flat.shape[:2], len(active)), flat], dim=2)
    kinks = torch.zeros_like(flat[..., 0], dtype=torch.bool)
    positions = [active.index(column) for column in bound.columns.active.get(name, ())]
    covering = [family for family in families if family is not None]
    if covering:
        matrix[..., positions] = torch.cat([family.values for family in covering], dim=2)
    for family in covering:
        kinks |= family.kinks
    return matrix, kinks


def _triangular_factors(matrices: Tensor) -> Tensor:
    """R of the QR factorisation of every member's matrix, on the CPU."""
    return torch.stack([triangular_factor(matrix) for matrix in matrices]).cpu()
