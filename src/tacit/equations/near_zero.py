"""Weights just outside the zero width of a penalty with a kink at zero, such as l1.

Training that oscillates across the kink leaves weights near zero, not at zero. Their condition is
an inequality all the same, and the sign of such a weight means nothing: the strength comes out too
small. At an optimum this shows: those weights have most of what is unexplained.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.equations.blocks import Block
from tacit.equations.candidates import BoundCandidates, Candidates
from tacit.equations.equations import Equations
from tacit.equations.rows import write_blocks
from tacit.objective.params import Params

UNEXPLAINED = 0.01
"""Unexplained part of ‖target‖² above which such weights are looked for."""
WIDTHS = (0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-6)
"""Zero widths that are tried, as parts of the largest weight."""
LARGE_WIDTH = 0.01
"""Smaller widths are not tried if those down to this one do not halve what is unexplained."""
MOST_ROWS = 2**24
"""Equations of more rows than this are not written again."""
SURE = 1e-3
"""The probability that unexplained parts of the same size in all rows would look like this."""
LARGER = 1.01
"""How many times larger a strength is without such weights, at least."""


def find_near_zero(
    candidates: Candidates,
    blocks: Sequence[Block],
    bound: BoundCandidates,
    targets: Sequence[Params],
    **at_point: Any,
) -> dict[str, Any]:
    """The weights just outside the zero width that have most of what is unexplained at a point.

    The equations are written again with larger zero widths, and the smallest of the widths is
    chosen that leaves hardly more unexplained than the best. The result are the fields `near_zero…`
    of a `Source`; none where that is not clearly less than what is unexplained now.

    Args:
        candidates: the regularizers of the call.
        blocks: the equations at the point.
        bound: the candidates at the point.
        targets: the target, one vector per group of draws.
        at_point: what `Candidates.bind` needs beside the parameters.
    """
    kinked = candidates.kinked(averaged=at_point.get("averaged") or {})
    now = _solve(blocks, bound, len(targets)) if kinked else None
    if now is None or now.unexplained <= UNEXPLAINED or now.rows > MOST_ROWS:
        return {}

    def solve_with(width: float) -> _Solution:
        wider = candidates.with_zero_width(width, kinked).bind(bound.params, bound.rows, **at_point)
        floors = dict.fromkeys(bound.params, 0.0)
        return _solve(write_blocks(wider, targets, floors=floors), wider, len(targets))

    fits: list[tuple[float, _Solution]] = []
    for width in WIDTHS:
        fit = solve_with(width)
        if 2 * len(fit.strengths) < fit.rows < now.rows:
            fits.append((width, fit))
        tried = width <= LARGE_WIDTH
        if tried and not any(fit.unexplained <= now.unexplained / 2 for _, fit in fits):
            return {}
    most = 2 * min(fit.unexplained for _, fit in fits) + 1e-6
    width, fit = min((w, fit) for w, fit in fits if fit.unexplained <= most)
    larger = {
        name: fit.strengths[name]
        for r in kinked
        for name in r.bind(bound.params).names
        if abs(fit.strengths[name]) > LARGER * abs(now.strengths[name])
    }
    halved = fit.unexplained <= now.unexplained / 2
    if not larger or not halved or _chance(now, fit) > SURE:
        return {}
    rows = now.rows - fit.rows
    return {"near_zero": larger, "near_zero_rows": rows, "near_zero_width": width}


class _Solution(NamedTuple):
    """The least-squares strengths of equations, and what they leave."""

    strengths: dict[str, float]
    rows: int
    residual: float
    """Sum of squares."""
    unexplained: float
    """The residual as a part of the target's sum of squares."""


def _solve(blocks: Sequence[Block], bound: BoundCandidates, targets: int) -> _Solution:
    names = bound.columns.names
    factor = Equations(bound.families, names, targets, tuple(blocks), ()).factor()
    design, target = factor[:, : len(names)], factor[:, len(names) :].mean(1)
    scale = design.norm(dim=0).clamp_min(torch.finfo(design.dtype).tiny)
    strengths: Tensor = (torch.linalg.pinv(design / scale, rtol=1e-12) @ target) / scale
    residual = float((target - design @ strengths).square().sum())
    whole = float(target.square().sum())
    rows = sum(block.rows for block in blocks)
    by_name = dict(zip(names, strengths.tolist(), strict=True))
    return _Solution(by_name, rows, residual, residual / whole if whole else 0.0)


def _chance(now: _Solution, fit: _Solution) -> float:
    """At most the probability that the rows left out have so much of the residual by chance.

    Under equal Gaussian residuals their part x is distributed as Beta(a, b), with 2a rows left out
    and 2b others, and P(x ≥ s) ≤ max(1, s^(a−1)) (1−s)^b / (b B(a, b)).
    """
    a = (now.rows - fit.rows) / 2
    b = max(fit.rows - len(fit.strengths), 1) / 2
    rest = fit.residual / now.residual if now.residual else 1.0
    if not 0 < rest < 1:
        return 0.0 if rest == 0 else 1.0
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    log_bound = max(0.0, (a - 1) * math.log1p(-rest)) + b * math.log(rest)
    return min(1.0, math.exp(min(0.0, log_bound - math.log(b) - log_beta)))
