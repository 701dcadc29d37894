"""Key numbers of the discovery figure, from its rows."""

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within
from tacit_paper.discovery.panels import BETA, POWER, RIDGE


def largest_error(rows: Table, panel: str) -> float:
    """The largest distance between a curve and its law, as a part of the largest |s′|."""
    curve = rows[(rows.panel == panel) & (rows.kind == "curve")]
    return float((curve.derivative - curve.law).abs().max() / curve.law.abs().max())


def slope_between(rows: Table, panel: str, low: float, high: float) -> float:
    """The slope of a curve by least squares, over the points between two weights."""
    curve = rows[(rows.panel == panel) & (rows.kind == "curve") & rows.x.between(low, high)]
    x = curve.x - curve.x.mean()
    return float((x * curve.derivative).sum() / (x * x).sum())


def check(rows: Table) -> list[Check]:
    """Errors of all curves, the slopes on both sides of a kink, and the exponent."""
    first = rows.drop_duplicates("panel").set_index("panel")
    outside = slope_between(rows, "elastic net", 1.2 * BETA, 10.0)
    inside = slope_between(rows, "elastic net", -0.8 * BETA, 0.8 * BETA)
    return [
        at_most("largest error, elastic net", largest_error(rows, "elastic net"), 0.05),
        within("slope of s′ above the kink, over the law's", outside / (2 * RIDGE), 0.95, 1.05),
        at_least("slope of s′ between the kinks, over that above", inside / outside, 6),
        at_most("largest error, diagonal network", largest_error(rows, "diagonal network"), 0.02),
        at_most("explained by ridge, diagonal network", first.ridge["diagonal network"], 0.8),
        at_most("largest error, AdamW", largest_error(rows, "AdamW"), 0.05),
        at_most("largest error, power law", largest_error(rows, "power law"), 0.05),
        within(
            "exponent of the power law", first.exponent["power law"], POWER - 0.01, POWER + 0.01
        ),
        at_least("least explained", first.explained.min(), 0.99),
        at_most("curves with a Problem", (first.problems != "").sum(), 0),
    ]
