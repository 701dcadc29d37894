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
    table = with_promised_coverage(coverage_table(rows))
    table = table[table.replicates >= MINIMUM_REPLICATES]
    checks = []
    moving = table.problem.str.startswith("moving")
    groups = {
        "sampling": table[(table.kind == "sampling") & ~moving],
        "sampling, moving design": table[moving],
        "draws": table[table.kind == "draws"],
    }
    for label, group in groups.items():
        if len(group):
            checks += [
                within(f"{label}: lowest coverage", group.covered.min(), 0.92, 0.97),
                within(f"{label}: highest coverage", group.covered.max(), 0.92, 0.97),
            ]
    for name, symbol, bound in (("l2", "λ₂", 0.85), ("smooth_l1", "λ₁", 0.70)):
        group = table[(table.kind == "training") & (table.name == name)]
        if len(group):
            widest = f"training, {symbol}: half-width over that of the true spread, highest"
            checks += [
                at_least(
                    f"training, {symbol}: lowest coverage over cells", group.covered.min(), bound
                ),
                at_most(widest, group.wide.max(), 3),
            ]
    return checks or [_check_mean_coverage(rows)]


def _check_mean_coverage(rows: Table) -> Check:
    """At the quick size only this can be checked: most intervals contain the true value."""
    covered = float(with_promised_coverage(coverage_table(rows)).covered.mean())
    return at_least("mean coverage (too few replicates for more)", covered, 0.8)


def wilson_interval(fraction: float, replicates: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a fraction that was counted among replicates."""
    z, n = NORMAL_QUANTILE, replicates
    centre = (fraction + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return centre - half, centre + half
