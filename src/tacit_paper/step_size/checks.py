"""Key numbers of the step-size figure, computed from its rows."""

import numpy as np

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within

SMALL_ETA = 0.01
"""Up to this step size, two columns are expected to agree with the theory to 2 %."""

FITTED = 0.99
"""Training accuracy from which a network counts as fitted to its training set."""


def select_networks(rows: Table) -> Table:
    """The networks, trained or not."""
    return rows[rows.kind == "network"]


def select_trained(rows: Table) -> Table:
    """The networks that have an estimate."""
    networks = select_networks(rows)
    return networks[networks.trained.astype(bool)]


def select_least_squares(rows: Table) -> Table:
    """Estimates on least squares, by step size."""
    return rows[rows.kind == "least squares"].sort_values("eta")


def convergence_order(table: Table, column: str) -> float:
    """The slope of log|ratio − 1| against log η, by least squares."""
    error = (table[column].astype(float) - 1).abs()
    x, y = np.log(table.eta.astype(float)), np.log(error)
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def check(rows: Table) -> list[Check]:
    """Key numbers against the expected ones."""
    networks, trained = select_networks(rows), select_trained(rows)
    first, second = trained.ratio_first, trained.ratio_second
    worst = (second[trained.eta <= SMALL_ETA] - 1).abs().max()
    closer = ((second - 1).abs() < (first - 1).abs()).mean()
    least_squares = select_least_squares(rows)
    order_first = convergence_order(least_squares, "ratio_first")
    order_second = convergence_order(least_squares, "ratio_second")
    untrained = f"networks of {len(networks)} that did not train (named in figure and rows)"
    return [
        within("lowest ratio to theory, one column", first.min(), 0.65, 1.02, tests="protocol"),
        within("highest ratio to theory, one column", first.max(), 0.65, 1.02, tests="protocol"),
        at_most(f"highest |ratio − 1| at η ≤ {SMALL_ETA:g}, two columns", worst, 0.02),
        at_least("fraction of networks where two columns are closer to 1", closer, 0.9),
        within("least squares: order of ratio − 1 in η, one column", order_first, 0.9, 1.1),
        within("least squares: order of ratio − 1 in η, two columns", order_second, 1.9, 2.1),
        at_most(untrained, len(networks) - len(trained), len(networks) // 2, tests="protocol"),
    ]
