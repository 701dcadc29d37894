"""Key numbers of the coverage figures, computed from their rows."""

import math

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within

MINIMUM_REPLICATES = 250
"""Replicates from which a coverage is compared with its bounds."""
NORMAL_QUANTILE = 1.959964
"""The 97.5 % quantile of the normal distribution."""


def coverage_table(rows: Table) -> Table:
    """How often the intervals contained the true value, by problem and strength.

    `covered` counts the intervals of tacit and `naive` those of ordinary least squares. `wide` is
    the median half-width over that of an interval made from the true spread of the estimates.
    """
    error = (rows.estimate - rows.truth).abs()
    intervals = rows.assign(
        covered=(rows.low <= rows.truth) & (rows.truth <= rows.high),
        naive=error <= NORMAL_QUANTILE * rows.naive_error,
        half=(rows.high - rows.low) / 2,
    )
    table = intervals.groupby(["kind", "problem", "name"], sort=False).agg(
        replicates=("covered", "size"),
        covered=("covered", "mean"),
        naive=("naive", "mean"),
        half=("half", "median"),
        spread=("estimate", "std"),
        truth=("truth", "first"),
    )
    return table.assign(wide=table.half / (NORMAL_QUANTILE * table.spread)).reset_index()


def with_promised_coverage(table: Table) -> Table:
    """The strengths whose coverage is promised.

    Error bars of training promise nothing for a strength that is small beside the other one.
    """
    return table[(table.kind != "training") | (table.truth >= 0.1)]


def check(rows: Table) -> list[Check]:
    """Coverage against what is promised, where there are enough replicates."""
    every = with_promised_coverage(coverage_table(rows))
    table = every[every.replicates >= MINIMUM_REPLICATES]
    moving = table.problem.str.startswith("moving")
    groups = {
        "sampling": table[(table.kind == "sampling") & ~moving],
        "sampling, moving design": table[moving],
        "draws": table[table.kind == "draws"],
    }
    checks = []
    for label, group in groups.items():
        if len(group):
            lowest, highest = group.covered.min(), group.covered.max()
            checks.append(within(f"{label}: lowest coverage", lowest, 0.92, 0.97))
            checks.append(within(f"{label}: highest coverage", highest, 0.92, 0.97))
    for name, symbol, bound in (("l2", "λ₂", 0.85), ("smooth_l1", "λ₁", 0.70)):
        group = table[(table.kind == "training") & (table.name == name)]
        if len(group):
            lowest = f"training, {symbol}: lowest coverage over cells"
            widest = f"training, {symbol}: half-width over that of the true spread, highest"
            checks.append(at_least(lowest, group.covered.min(), bound))
            checks.append(at_most(widest, group.wide.max(), 3))
    # At the quick size only this can be checked: most intervals contain the true value.
    label = "mean coverage (too few replicates for more)"
    return checks or [at_least(label, every.covered.mean(), 0.8)]


def wilson_interval(fraction: float, replicates: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a fraction that was counted among replicates."""
    z, n = NORMAL_QUANTILE, replicates
    centre = (fraction + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return centre - half, centre + half
