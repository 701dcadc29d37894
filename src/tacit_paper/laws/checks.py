"""Whether every law is recovered, from the rows."""

import math

import numpy as np

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most

LAWS = 81
"""How many laws there are."""
LARGEST_ERROR = 0.01
"""The relative error up to which a law is recovered; otherwise it has to lie in its interval."""
WIDEST = 0.1
"""Half-width of the interval of a drawn estimate, at most, relative to the coefficient."""
ROUNDING = 1e-7
"""Errors below this say nothing about the order."""
SLOPE_ERROR = 0.1
"""How far the measured order may be from theory's, for any seed."""
LEAST_EXPLAINED = 0.99
"""What the terms of a law explain of the target, at least: no law here leaves a part out."""


def law_table(rows: Table) -> Table:
    """One row per term of every law, at its limit.

    Ratios are means over seeds, with the interval of that mean; `error` is the largest of a seed.
    A term with a row whose ratio, or alone whose interval, is not a number is not recovered.
    """
    limit = rows[rows.at_limit].copy()
    limit["error"] = (limit.ratio - 1).abs()
    limit["covered"] = (limit.low <= 1) & (limit.high >= 1)
    limit["half_width"] = (limit.high - limit.low) / 2
    keys = ["section", "law", "technique", "term", "source", "equations", "parameter", "order"]
    table = limit.groupby(keys, sort=False, dropna=False).agg(
        value=("value", "first"),
        estimates=("ratio", "size"),
        numbers=("ratio", "count"),
        ratio=("ratio", "mean"),
        error=("error", "max"),
        covered=("covered", "mean"),
        half_width=("half_width", "max"),
        intervals=("half_width", "count"),
        explained=("explained", "min"),
    )
    table = table.reset_index()
    of_mean = table.half_width / table.estimates**0.5
    table["low"], table["high"] = table.ratio - of_mean, table.ratio + of_mean
    within = (table.ratio - 1).abs() <= of_mean.fillna(0)
    table["drawn"] = table.half_width.notna()
    close = (table.ratio - 1).abs().where(table.drawn, table.error) <= LARGEST_ERROR
    all_there = (table.intervals == 0) | (table.intervals == table.estimates)
    all_there &= table.numbers == table.estimates
    table["recovered"] = (close | within) & all_there
    parts = [
        rows[(rows.law == law) & (rows.term == term)]
        for law, term in zip(table.law, table.term, strict=True)
    ]
    table["slope"] = [_slope(part) for part in parts]
    table["slope_error"] = [_slope_error(part) for part in parts]
    return table


def _slope(part: Table) -> float:
    """The slope of log|ratio − 1| in the log of the parameter, where the law has an order."""
    error = (part.ratio - 1).abs().groupby(part.value).mean()
    if len(error) < 2 or not part.order.iloc[0] or not error.min(skipna=False) >= ROUNDING:
        return math.nan
    return float(np.polyfit(np.log(error.index.to_numpy()), np.log(error.to_numpy()), 1)[0])


def _slope_error(part: Table) -> float:
    """How far the slope of any seed is from the order; not a number if one has no slope."""
    slopes = [_slope(of_seed) for _, of_seed in part.groupby("seed")]
    return float(np.abs(np.array(slopes) - part.order.iloc[0]).max())


def check(rows: Table) -> list[Check]:
    """The number of laws, and the worst of their errors, orders and problems."""
    table = law_table(rows)
    exact, drawn = table[~table.drawn], table[table.drawn]
    off = table[table.order != 0].slope_error
    return [
        at_least("laws", table.law.nunique(), LAWS),
        at_least("terms within 1 %, or inside their interval", table.recovered.mean(), 1),
        at_most("largest error of a term that is not drawn", exact.error.max(), LARGEST_ERROR),
        at_most("largest half-width of an interval", drawn.half_width.max(), WIDEST),
        at_least("intervals that contain theory, of single seeds", drawn.covered.mean(), 0.8),
        at_most("largest error of an order of convergence", off.max(), SLOPE_ERROR),
        at_most("orders that could not be measured", off.isna().sum(), 0),
        at_least("least part explained", rows.explained.min(skipna=False), LEAST_EXPLAINED),
        at_most("fits with a Problem", (rows.problems != "").sum(), 0),
    ]


def markdown_table(rows: Table, section: str) -> str:
    """The table of a section for the documentation."""
    lines = ["| technique | adds | source | estimate / theory | order |", "| --- " * 5 + "|"]
    for row in law_table(rows[rows.section == section]).itertuples():
        ratio = f"{row.ratio:.4f}" + (f" ± {row.high - row.ratio:.3f}" if row.drawn else "")
        order = f"{row.slope:.2f} ({row.order:g})" if row.order else ""
        cells = (row.technique, row.term, row.source, ratio, order)
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines)
