"""All error bars that equations alone allow."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tacit.equations import Equations
from tacit.uncertainty.clusters import of_layers, of_sources
from tacit.uncertainty.draws import of_draws
from tacit.uncertainty.error_bars import KINDS, ErrorBars
from tacit.uncertainty.steps import of_steps


def from_equations(
    equations: Equations, strengths: Tensor, *, nonnegative: bool = False
) -> dict[str, ErrorBars]:
    """Error bars by kind of chance, the most telling first; a kind that cannot be told is absent.

    Under λ ≥ 0 they are those of the strengths above zero, as if the others had not been
    candidates. A strength held at zero has a NaN variance: near a bound no covariance says how
    else it could have come out.

    Args:
        equations: what was fitted.
        strengths: the fitted strengths, in float64.
        nonnegative: whether they were fitted under λ ≥ 0.
    """
    if nonnegative and bool((strengths <= 0).any()):
        free = torch.nonzero(strengths > 0)[:, 0]
        if not len(free):
            return {}
        found = from_equations(equations.only(free.tolist()), strengths[free])
        return {kind: _widened(bars, equations.names, free) for kind, bars in found.items()}
    if not any(block.rows and block.columns for block in equations.blocks):
        return {}
    found = (
        of_draws(equations),
        of_sources(equations),
        of_steps(equations, strengths),
        of_layers(equations),
    )
    kinds = {bars.kind: bars for bars in found if bars is not None}
    return {kind: kinds[kind] for kind in KINDS if kind in kinds}


def _widened(bars: ErrorBars, names: tuple[str, ...], free: Tensor) -> ErrorBars:
    """The same error bars among all strengths, NaN for those that were not free."""
    covariance = torch.full((len(names), len(names)), math.nan, dtype=torch.float64)
    covariance[free[:, None], free] = bars.covariance
    freedoms = [bars.freedom] * len(names)
    for place, freedom in zip(free.tolist(), bars.freedoms, strict=False):
        freedoms[place] = freedom
    return replace(bars, names=names, covariance=covariance, freedoms=tuple(freedoms))
