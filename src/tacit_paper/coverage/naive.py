"""Ordinary least-squares standard errors, for contrast with those of tacit."""

import math

from tacit.equations.equations import Equations
from tacit.fitting.solving import System


def naive_errors(equations: Equations) -> dict[str, float]:
    """Standard errors as if rows were independent: √(σ² diag (ΦᵀΦ)⁻¹), σ² = ‖residual‖²/(n − k).

    Trap: they are wrong for these equations; report those of `Fit.error_bars` instead. The rows
    are the entries of one gradient, and all of them come from the same examples, draws and training
    run, so their errors are not independent. What stays unexplained is more often a missing
    regularizer than noise. With millions of rows these standard errors are tiny in any case.
    """
    count = len(equations.names)
    factor = equations.factor()
    system, target = System(factor[:, :count]), factor[:, count:].mean(1, keepdim=True)
    residual = target - system.design @ system.solve(target)
    degrees_of_freedom = equations.rows - system.rank
    squares = float(residual.square().sum())
    variance = squares / degrees_of_freedom if degrees_of_freedom > 0 else math.nan
    errors = (variance * system.inflation).sqrt() / system.norms
    return dict(zip(equations.names, errors.tolist(), strict=True))
