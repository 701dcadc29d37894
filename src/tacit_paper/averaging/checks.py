"""Key numbers of the averaging figure, computed only from its rows."""

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most


def check(rows: Table) -> list[Check]:
    """The mean of iterates is pulled to its start, by about the same strength everywhere."""
    directions, networks, retrained = select(rows)
    error = (directions.strength - directions.theory).abs().max() / directions.theory.max()
    mean = networks[networks.kind == "mean"]
    scaled = scaled_strengths(mean, "strength_start")
    ridge = (mean.both_ridge / mean.both_start).abs()
    distances = retrained.groupby("penalty").distance.median()
    start, layers = mean.explained_start, mean.explained_layers
    longest = mean[mean.epochs == mean.epochs.max()]
    return [
        at_most("least squares: largest error of a direction's strength", error, 1e-9),
        at_least("networks: median fraction that the pull explains", start.median(), 0.9),
        at_most("the same for ridge", mean.explained_ridge.median(), 0.7),
        at_least("networks: median fraction with a pull per layer", layers.median(), 0.9),
        at_least("lowest fraction, longest average", longest.explained_start.min(), 0.75),
        at_least("networks: lowest strength of the pull times 2ηt", scaled.min(), 1),
        at_most("networks: highest strength of the pull times 2ηt", scaled.max(), 2.2),
        at_most("fitted together: ridge over pull, median", ridge.median(), 0.1),
        at_most("retrained with the pull: distance", distances["pull to the start"], 0.3),
        at_least("retrained with ridge: distance", distances["ridge"], 0.6),
    ]


def select(rows: Table) -> tuple[Table, Table, Table]:
    """Rows of least squares, of networks, and of networks that were trained again."""
    least_squares = rows.unit == "least squares"
    retrained = rows.kind == "retrained"
    return rows[least_squares], rows[~least_squares & ~retrained], rows[retrained]


def scaled_strengths(rows: Table, column: str) -> Table:
    """Strengths times 2ηt: between 1 and 2 for the mean of iterates on a quadratic loss."""
    return rows[column] * 2 * rows.time
