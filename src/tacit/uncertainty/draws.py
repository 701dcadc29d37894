"""Replicates: how strengths differ between independent groups of a technique's draws."""

from tacit.equations import Equations
from tacit.solving import System
from tacit.uncertainty.error_bars import ErrorBars, undetermined


def of_draws(equations: Equations) -> ErrorBars | None:
    """Error bars from G ≥ 2 groups of draws, each a target column with strengths λ̂_g of its own.

    The strengths of the mean target are the mean of the λ̂_g, hence

        covariance = Σ_g (λ̂_g − λ̂)(λ̂_g − λ̂)ᵀ / (G(G−1)),

    with G−1 degrees of freedom. It holds whatever the draws do within a group, so that mirrored
    pairs may share one, and for groups of unequal noise too.
    """
    groups, count = equations.targets, len(equations.names)
    if groups < 2:
        return None
    factor = equations.factor()
    system = System(factor[:, :count])
    found = system.solve(factor[:, count:])
    apart = found - found.mean(1, keepdim=True)
    covariance = undetermined(apart @ apart.T / (groups * (groups - 1)), system.inflation)
    basis = f"{groups} groups of draws"
    return ErrorBars("draws", basis, equations.names, covariance, groups - 1.0)
