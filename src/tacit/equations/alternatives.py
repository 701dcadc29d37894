"""Other candidates beside those of a call: what a fit that explains too little is compared with.

They need only the weights, so that they cost no pass over the data. They are written while the
target is in memory, and only where the candidates of the call leave a part of it unexplained.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tacit.equations.equations import Block, Equations, triangular_factor
from tacit.equations.rows import BoundCandidates, read_block
from tacit.objective.params import Params, norm, to_float64
from tacit.regularizers.family import Columns, join_columns

UNEXPLAINED = 0.01
"""Unexplained part of ‖target‖² above which alternatives are written."""
MOST_COLUMNS = 24
"""Candidates of more columns than this have no alternatives."""
MOST_ROWS = 2**20
"""Of larger tensors, slices of about as many rows in all are read."""
WEIGHTS, BIASES = "weights", "biases and norms"
"""The blocks of a point: tensors of two or more dimensions, and the others."""


def write_alternatives(
    blocks: Sequence[Block], bound: BoundCandidates, targets: Sequence[Params], source: int = 0
) -> tuple[list[Block], tuple[str, ...]]:
    """The equations of these blocks with the columns of other families, and their names.

    There is one block for matrices, that is, weights, and one for vectors: biases and norms. There
    is none where the candidates leave no part of the mean target unexplained.
    """
    names = bound.columns.names
    given = Equations(bound.families, names, len(targets), tuple(blocks), ())
    if not 0 < len(names) <= MOST_COLUMNS or not _lacks(given.factor(), len(names)):
        return [], ()
    others = _other_families(bound.params)
    wide = replace(bound, columns=join_columns([bound.columns, others]))
    written = []
    for kind in (WEIGHTS, BIASES):
        tensors = [n for n in wide.rows if (wide.params[n].ndim >= 2) == (kind == WEIGHTS)]
        if tensors:
            written.append(replace(_write_block(wide, tensors, targets), layer=kind, source=source))
    return written, others.names


def _lacks(factor: Tensor, count: int) -> bool:
    """Whether the first columns leave a part of the mean of the others unexplained."""
    design, target = factor[:, :count], factor[:, count:].mean(1)
    scale = design.norm(dim=0).clamp_min(torch.finfo(design.dtype).tiny)
    rest = target - design @ (torch.linalg.pinv(design / scale, rtol=1e-12) @ target / scale)
    return float(rest.norm()) > UNEXPLAINED**0.5 * float(target.norm())


def _other_families(params: Params) -> Columns:
    """Ridge, lasso and smoothed lasso, each under the name by which it is called.

    Rows at kinks are not left out, because the rows must be those of the equations.
    """
    entries = sum(p.numel() for p in params.values())
    # A tenth of a typical weight, to one digit.
    beta = float(f"{norm(params) / max(entries, 1) ** 0.5 / 10:.0e}") or 1.0

    def rows(name: str, part: slice) -> Tensor:
        theta = to_float64(params[name].detach().flatten()[part])
        return torch.stack([2 * theta, theta.sign(), (theta / beta).clamp(-1, 1)], dim=1)

    names = ("l2()", "l1()", f"smooth_l1({beta:g})")
    return Columns(names, dict.fromkeys(params, tuple(range(len(names)))), rows)


def _write_block(bound: BoundCandidates, names: Sequence[str], targets: Sequence[Params]) -> Block:
    """The equations of these tensors as one block; of large tensors, of slices of them."""
    columns = tuple(range(len(bound.columns.names)))
    width = len(columns) + len(targets)
    factor, rows = torch.zeros(0, width, dtype=torch.float64), 0
    for name in names:
        size = bound.params[name].numel()
        parts = list(bound.slices(name, width))
        parts = parts[:: max(1, round(size / MOST_ROWS))]
        weight = (size / sum(part.stop - part.start for part in parts)) ** 0.5 if parts else 1.0
        for part in parts:
            matrix, _ = read_block(bound, name, part, list(columns), targets)
            factor = triangular_factor(torch.cat([factor.to(matrix), weight * matrix]))
        rows += size
    return Block("", columns, factor.cpu(), rows, 0, 0.0)
