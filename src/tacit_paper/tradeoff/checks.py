"""Key numbers of the trade-off figure, computed only from its rows."""

from tacit_paper import Check, Table
from tacit_paper.checking import at_most


def check(rows: Table) -> list[Check]:
    """The estimated strength equals the true one, and the gradients cancel."""
    (optimum,) = rows[rows.unit == "estimate"].to_dict("records")
    error = abs(optimum["estimated"] / optimum["strength"] - 1)
    gradient = abs(optimum["loss_gradient"] + optimum["penalty_gradient"])
    return [
        at_most("relative error of the strength", error, 1e-10, tests="protocol"),
        at_most("|∇L + ∇R| at the ridge optimum", gradient, 1e-12, tests="protocol"),
    ]
