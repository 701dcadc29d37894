"""Compare a key number with a bound or a range."""

from typing import Literal

from tacit_paper import Check

Tests = Literal["protocol", "expectation"]
"""What failed where a number does not hold: the paper's protocol, or our expectation."""


def at_most(label: str, value: float, bound: float, *, tests: Tests = "expectation") -> Check:
    """Check that a number does not exceed a bound."""
    return Check(label, float(value), f"≤ {bound:g}", bool(value <= bound), tests)


def at_least(label: str, value: float, bound: float, *, tests: Tests = "expectation") -> Check:
    """Check that a number reaches a bound."""
    return Check(label, float(value), f"≥ {bound:g}", bool(value >= bound), tests)


def within(
    label: str, value: float, low: float, high: float, *, tests: Tests = "expectation"
) -> Check:
    """Check that a number lies in a range, ends included."""
    return Check(label, float(value), f"{low:g} to {high:g}", bool(low <= value <= high), tests)
