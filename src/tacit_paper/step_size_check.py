"""The key numbers of `step_size`, from its rows alone."""

import math

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within

SMALL = 0.01
"""Step sizes up to here are expected to be found to 2 % with the second column."""


def cells(rows: Table) -> Table:
    """The networks, trained or not."""
    return rows[rows.kind == "network"]


def trained(rows: Table) -> Table:
    """The networks that have an estimate."""
    every = cells(rows)
    return every[every.trained.astype(bool)]


def least_squares(rows: Table) -> Table:
    """Estimates on least squares, by step size."""
    return rows[rows.kind == "least squares"].sort_values("eta")


def order(table: Table, column: str) -> float:
    """The slope of log|ratio − 1| against log η."""
    import numpy as np

    off = (table[column].astype(float) - 1).abs()
    x, y = np.log(table.eta.astype(float)), np.log(off)
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def check(rows: Table) -> list[Check]:
    """Key numbers against the expected ones."""
    found, every, plain = trained(rows), cells(rows), least_squares(rows)
    first, second = found.ratio_first, found.ratio_second
    small = (second[found.eta <= SMALL] - 1).abs()
    closer = ((second - 1).abs() < (first - 1).abs()).mean()
    missing = len(every) - len(found)
    return [
        within("least ratio to theory, one column", first.min(), 0.65, 1.02),
        within("largest ratio to theory, one column", first.max(), 0.65, 1.02),
        at_most(f"largest |ratio − 1| at η ≤ {SMALL:g}, two columns", small.max(), 0.02),
        at_least("share of networks where two columns are closer to 1", closer, 0.9),
        within(
            "least squares: order of the ratio in η, one column",
            order(plain, "ratio_first"),
            0.9,
            1.1,
        ),
        within(
            "least squares: order of the ratio in η, two columns",
            order(plain, "ratio_second"),
            1.9,
            2.1,
        ),
        at_most(
            f"networks of {len(every)} that did not train (named in figure and rows)",
            missing,
            math.floor(len(every) / 2),
        ),
    ]
