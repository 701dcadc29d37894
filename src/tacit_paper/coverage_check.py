"""The key numbers of `coverage`, from its rows alone."""

import math

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within

ENOUGH = 250
"""Replicates from which a share is worth holding against a bound."""
NOMINAL = 1.959964


def shares(rows: Table) -> Table:
    """How often intervals and naive ones held the value, by problem and strength.

    `wide` is the median half-width over that of an interval made from the true spread of the
    estimates.
    """
    away = (rows.estimate - rows.truth).abs()
    held = rows.assign(
        covered=(rows.low <= rows.truth) & (rows.truth <= rows.high),
        naive=away <= NOMINAL * rows.naive_error,
        half=(rows.high - rows.low) / 2,
    )
    groups = held.groupby(["kind", "problem", "name"], sort=False)
    found = groups.agg(
        replicates=("covered", "size"),
        covered=("covered", "mean"),
        naive=("naive", "mean"),
        half=("half", "median"),
        spread=("estimate", "std"),
        truth=("truth", "first"),
    )
    return found.assign(wide=found.half / (NOMINAL * found.spread)).reset_index()


def assessed(found: Table) -> Table:
    """The strengths that a promise is made for: small ones beside large are no training target."""
    return found[(found.kind != "training") | (found.truth >= 0.1)]


def check(rows: Table) -> list[Check]:
    """Coverage against what is promised, where there are replicates enough to tell."""
    found = assessed(shares(rows))
    found = found[found.replicates >= ENOUGH]
    checks = []
    moving = found.problem.str.startswith("moving")
    parts = {
        "sampling": found[(found.kind == "sampling") & ~moving],
        "sampling, moving design": found[moving],
        "draws": found[found.kind == "draws"],
    }
    for label, own in parts.items():
        if len(own):
            checks += [
                within(f"{label}: covered, least", own.covered.min(), 0.92, 0.97),
                within(f"{label}: covered, most", own.covered.max(), 0.92, 0.97),
            ]
    for name, symbol, least in (("l2", "λ₂", 0.85), ("smooth_l1", "λ₁", 0.70)):
        own = found[(found.kind == "training") & (found.name == name)]
        if len(own):
            checks += [
                at_least(
                    f"training, {symbol}: covered, least over cells", own.covered.min(), least
                ),
                at_most(f"training, {symbol}: half-width over true, most", own.wide.max(), 3),
            ]
    return checks or [_smoke(rows)]


def _smoke(rows: Table) -> Check:
    """At the quick size there is only this to say: intervals were made, and most hold."""
    covered = float(assessed(shares(rows)).covered.mean())
    return at_least("covered, mean (too few replicates for more)", covered, 0.8)


def count_range(share: float, replicates: int) -> tuple[float, float]:
    """Wilson's 95 % range of a share that was counted."""
    z, n = NOMINAL, replicates
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half
