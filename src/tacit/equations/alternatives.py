"""Other candidates beside those of a call: what a fit that explains too little is compared with.

They need only the weights, so that they cost no pass over the data. They are written while the
target is in memory, and only where the candidates of the call leave a part of it unexplained.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.equations.blocks import Block, join_parts
from tacit.equations.candidates import BoundCandidates, Candidates
from tacit.equations.equations import Equations
from tacit.equations.factors import factor_of
from tacit.equations.rows import Part, ScatterSum, read_block
from tacit.objective.params import Params, entries, norm
from tacit.regularizers.elementwise import l1, l2, smooth_l1
from tacit.regularizers.family import join_columns
from tacit.regularizers.weight_decay import ridge_in_metric

if TYPE_CHECKING:
    from tacit.equations.points import TargetPoint

UNEXPLAINED = 0.01
"""Unexplained part of ‖target‖² above which alternatives are written."""
MOST_COLUMNS = 24
"""Candidates of more columns than this have no alternatives."""
MOST_ROWS, SLICE = 2**13, 2**11
"""Of tensors of more rows, slices of at most so many rows in all are read, spread over them."""
MOST_SLICES = 32
"""Of several tensors fewer slices are read of each; of more tensors than this, one of every few
tensors is read. Reading a slice takes longer than computing with it."""
WEIGHTS, BIASES = "weights", "biases and norms"
"""The blocks of a point: tensors of two or more dimensions, and the others."""


def other_families(params: Params, metric: Params) -> Candidates:
    """Ridge, lasso and smoothed lasso, each under the name by which it is called.

    Where the optimizer has a metric, ridge in it too: what AdamW's decay applies.
    """
    # A tenth of a typical weight, to one digit.
    beta = float(f"{norm(params) / max(entries(params), 1) ** 0.5 / 10:.0e}") or 1.0
    smooth = smooth_l1(beta, name=f"smooth_l1({beta:g})")
    in_metric = [ridge_in_metric(metric, name="metric_ridge(optimizer, model)")] if metric else []
    return Candidates((l2(name="l2()"), l1(name="l1()"), smooth, *in_metric), {})


def write_alternatives(
    bound: BoundCandidates, others: Candidates, point: "TargetPoint"
) -> list[Block]:
    """The equations of a point with the columns of other families after the candidates'.

    There is one block for matrices, that is, weights, and one for vectors: biases and norms.
    """
    targets = point.vectors
    if len(bound.columns.names) > MOST_COLUMNS:
        return []
    columns = others.bind(point.params, metric=point.metric).columns
    wide = replace(bound, columns=join_columns([bound.columns, columns]))
    written = []
    for kind in (WEIGHTS, BIASES):
        tensors = [n for n in wide.rows if (wide.params[n].ndim >= 2) == (kind == WEIGHTS)]
        if tensors:
            written.append(replace(_write_block(wide, tensors, targets), layer=kind))
    return join_parts(written)


def leave_unexplained(equations: Equations) -> bool:
    """Whether the candidates leave a part of the mean target unexplained."""
    factor, count = equations.factor(), len(equations.names)
    design, target = factor[:, :count], factor[:, count:].mean(1)
    scale = design.norm(dim=0).clamp_min(torch.finfo(design.dtype).tiny)
    rest = target - design @ (torch.linalg.pinv(design / scale, rtol=1e-12) @ target / scale)
    return float(rest.norm()) > UNEXPLAINED**0.5 * float(target.norm())


def _write_block(bound: BoundCandidates, names: Sequence[str], targets: Sequence[Params]) -> Block:
    """The equations of these tensors as one block; of large tensors, of slices of them."""
    columns = tuple(range(len(bound.columns.names)))
    width = len(columns) + len(targets)
    scatter = ScatterSum(bound, names, width)
    rows = sum(bound.params[name].numel() for name in names)
    chosen = names[:: max(1, -(-len(names) // MOST_SLICES))]
    every = rows / max(1, sum(bound.params[name].numel() for name in chosen))
    by_device: dict[torch.device, list[Part]] = {}
    weights: dict[str, float] = {}
    for name in chosen:
        size = bound.params[name].numel()
        parts = _sample(bound, name, width, most=max(1, MOST_SLICES // len(chosen)))
        read = sum(part.stop - part.start for part in parts)
        weights[name] = (every * size / read) ** 0.5 if read else 1.0
        here = by_device.setdefault(bound.params[name].device, [])
        here += [(name, part) for part in parts]
    matrices: list[Tensor] = []
    for parts in by_device.values():
        matrix = read_block(bound, parts, columns, targets)[0]
        sizes = [part.stop - part.start for _, part in parts]
        for (name, part), rows_here in zip(parts, matrix.split(sizes), strict=True):
            scatter.add(name, part, rows_here, weights[name])
        each = torch.tensor([weights[name] for name, _ in parts], dtype=matrix.dtype)
        matrices.append(each.repeat_interleave(torch.tensor(sizes))[:, None].to(matrix) * matrix)
    factor = factor_of(matrices, width)
    return scatter.attach(Block("", columns, factor, rows, 0, 0.0))


def _sample(bound: BoundCandidates, name: str, width: int, *, most: int) -> list[slice]:
    """Slices of a tensor: all of it, or some that are spread over it."""
    size = bound.params[name].numel()
    if size <= MOST_ROWS or bound.subspace(name) is not None:
        return list(bound.slices(name, width))
    number = min(MOST_ROWS // SLICE, most)
    starts = [(size - SLICE) * (2 * i + 1) // (2 * number) for i in range(number)]
    return [slice(start, start + SLICE) for start in starts]
