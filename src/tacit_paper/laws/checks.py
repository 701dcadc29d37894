"""Whether every law is recovered, from the rows."""

import math

import numpy as np

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most

LARGEST_ERROR = 0.01
"""The relative error up to which a law is recovered; otherwise it has to lie in its interval."""
WIDEST = 0.1
"""Half-width of the interval of a drawn estimate, at most, relative to the coefficient."""
ROUNDING = 1e-7
"""Errors below this say nothing about the order."""
SLOPE_ERROR = 0.1
"""How far the measured order may be from theory's."""


def law_table(rows: Table) -> Table:
    """One row per term of every law: at its limit, means over seeds and the worst error."""
    limit = rows[rows.at_limit].copy()
    limit["error"] = (limit.ratio - 1).abs()
    limit["covered"] = (limit.low <= 1) & (limit.high >= 1)
    limit["recovered"] = (limit.error <= LARGEST_ERROR) | limit.covered
    limit["half_width"] = (limit.high - limit.low) / 2
    keys = ["section", "law", "technique", "term", "source", "equations", "parameter", "order"]
    table = limit.groupby(keys, sort=False).agg(
        value=("value", "first"),
        ratio=("ratio", "mean"),
        low=("low", "min"),
        high=("high", "max"),
        error=("error", "max"),
        half_width=("half_width", "max"),
        recovered=("recovered", "all"),
        explained=("explained", "min"),
        problems=("problems", _join),
    )
    table["slope"] = [_slope(rows, *key[1:4:2]) for key in table.index]
    return table.reset_index()


def _join(problems: Table) -> str:
    return ", ".join(sorted({kinds for kinds in problems if kinds}))


def _slope(rows: Table, law: str, term: str) -> float:
    """The slope of log|ratio − 1| in the log of the parameter, where the law has an order."""
    part = rows[(rows.law == law) & (rows.term == term)]
    error = (part.ratio - 1).abs().groupby(part.value).mean()
    if len(error) < 2 or not part.order.iloc[0] or error.min() < ROUNDING:
        return math.nan
    return float(np.polyfit(np.log(error.index.to_numpy()), np.log(error.to_numpy()), 1)[0])


def check(rows: Table) -> list[Check]:
    """The number of laws, and the worst of their errors, orders and problems."""
    table = law_table(rows)
    exact, drawn = table[table.half_width.isna()], table[table.half_width.notna()]
    ordered = table[table.order > 0]
    off = (ordered.slope - ordered.order).abs()
    return [
        at_least("laws", table.law.nunique(), 45),
        at_least("terms that are within 1 % or inside their interval", table.recovered.mean(), 1),
        at_most("largest error of a term without draws", exact.error.max(), LARGEST_ERROR),
        at_most("widest 95 % interval of a drawn term, half of it", drawn.half_width.max(), WIDEST),
        at_most("largest error of an order of convergence", off.max(), SLOPE_ERROR),
        at_most("orders that could not be measured", off.isna().sum(), 0),
        at_most("fits with a Problem", (table.problems != "").sum(), 0),
    ]
