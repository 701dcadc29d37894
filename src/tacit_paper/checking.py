"""Compare a key number with a bound or a range."""

from tacit_paper import Check


def at_most(label: str, value: float, bound: float) -> Check:
    """Check that a number does not exceed a bound."""
    return Check(label, float(value), f"≤ {bound:g}", bool(value <= bound))


def at_least(label: str, value: float, bound: float) -> Check:
    """Check that a number reaches a bound."""
    return Check(label, float(value), f"≥ {bound:g}", bool(value >= bound))


def within(label: str, value: float, low: float, high: float) -> Check:
    """Check that a number lies in a range, ends included."""
    return Check(label, float(value), f"{low:g} to {high:g}", bool(low <= value <= high))
