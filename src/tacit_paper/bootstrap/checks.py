"""Key numbers of the bootstrap figure, computed only from its rows."""

import math
from collections.abc import Iterable

import numpy as np

from tacit_paper import Check, Table
from tacit_paper.checking import at_most, within


def check(rows: Table) -> list[Check]:
    """Key numbers beside their expected values."""
    pairs, residual = select(rows, "E", "pairs"), select(rows, "E", "residual")
    pairs_by_noise = select(rows, "F", "pairs")
    medians = pairs.groupby("m").relative.median()
    at_ten = pairs_by_noise.relative[pairs_by_noise.sigma == 10].mean()
    exact = residual.relative[residual.m >= 11].max()
    exact_by_noise = select(rows, "F", "residual").relative.max()
    paper_crossover, further = crossovers(rows)
    norm = float(pairs.baseline.iloc[0])
    return [
        Check("‖Λ(500)‖, Frobenius", norm, "0.02610", abs(norm - 0.02610) < 5e-6, "protocol"),
        within(
            "pairs, σ = 10, m = 100: relative error (panel F, mean)",
            at_ten, 0.52, 0.72, tests="protocol",
        ),
        within("the same in panel E (median)", medians.iloc[-1], 0.52, 0.72, tests="protocol"),
        within(
            "m at which the pairs bootstrap is worst", float(medians.idxmax()), 8, 12,
            tests="protocol",
        ),
        within(
            "crossover with Λ̂ = 0 on the paper's draw, σ", paper_crossover, 5, 7.5,
            tests="protocol",
        ),
        within(f"median crossover of {len(further)} further draws, σ", further.median(), 6, 10),
        at_most("residual, σ = 10, m ≥ 11: largest relative error", exact, 1e-9),
        at_most("residual, every σ, m = 100: largest relative error", exact_by_noise, 1e-9),
    ]  # fmt: skip


def select(rows: Table, panel: str, series: str) -> Table:
    """The rows of one curve of one panel."""
    return rows.loc[(rows.panel == panel) & (rows.series == series)]


def crossovers(rows: Table) -> tuple[float, Table]:
    """The σ above which the pairs bootstrap is better than Λ̂ = 0, from means over pools.

    Returns the one on the paper's draw, and those on the further draws.
    """
    paper = select(rows, "F", "pairs").groupby("sigma").relative.mean()
    further = further_draws(rows)
    further_crossovers = further.apply(lambda errors: crossover(further.columns, errors), axis=1)
    return crossover(paper.index, paper), further_crossovers


def further_draws(rows: Table) -> Table:
    """Relative errors, averaged over pools: one line per further draw, one column per σ."""
    return select(rows, "F", "draw").groupby(["draw", "sigma"]).relative.mean().unstack()


def crossover(sigmas: Iterable[float], errors: Iterable[float]) -> float:
    """The last σ at which relative errors fall through 1; NaN if there is none.

    It is interpolated between the neighbouring values of σ, linearly in log σ and log error.
    """
    x, y = np.log([*sigmas]), np.log([*errors])
    above = np.nonzero(y > 0)[0]
    if not len(above) or above[-1] == len(y) - 1:
        return math.nan
    k = above[-1]
    return float(np.exp(x[k] + (x[k + 1] - x[k]) * y[k] / (y[k] - y[k + 1])))
