"""Key numbers of the long-horizon figure, computed from its rows."""

from tacit_paper import Check, Table
from tacit_paper.checking import at_most, within


def final_ratios(rows: Table) -> dict[str, float]:
    """By unit: the last distance from the modified flow over that from the flow of the loss."""
    last = rows.sort_values("step").groupby("unit", sort=False).last()
    return {unit: float(row.modified / row.plain) for unit, row in last.iterrows()}


def check(rows: Table) -> list[Check]:
    """The modified flow stays close to descent where the loss is smooth, and not for ReLU."""
    label = "distance from the modified flow over that from the plain one, at the end: "
    return [
        within(f"{label}{unit} (outside the theory)", ratio, 0.5, 1.5)
        if unit == "ReLU"
        else at_most(label + unit, ratio, 0.05, tests="protocol")
        for unit, ratio in sorted(final_ratios(rows).items(), key=lambda item: item[0] == "ReLU")
    ]
