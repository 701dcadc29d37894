"""Ordinary least-squares standard errors, for contrast."""

import math

from tacit.equations.equations import Equations
from tacit.fitting.solving import System


def naive_errors(equations: Equations) -> dict[str, float]:
    """Standard errors as if rows were independent: √(σ² diag (ΦᵀΦ)⁻¹), σ² = ‖residual‖²/(n − k).

    They are wrong here. Rows are the entries of one gradient: all of them come from the same
    examples, draws and training run, so that their errors are not independent, and what stays
    unexplained is a missing regularizer more often than noise. With millions of rows they are
    tiny, whatever is wrong. `Fit.error_bars` has those to report.
    """
    count = len(equations.names)
    factor = equations.factor()
    system, target = System(factor[:, :count]), factor[:, count:].mean(1, keepdim=True)
    residual = target - system.design @ system.solve(target)
    freedom = equations.rows - system.rank
    variance = float(residual.square().sum()) / freedom if freedom > 0 else math.nan
    errors = (variance * system.inflation).sqrt() / system.norms
    return dict(zip(equations.names, errors.tolist(), strict=True))
