"""Key numbers beside what is expected of them, in three forms."""

from tacit_paper import Check


def at_most(label: str, value: float, bound: float) -> Check:
    """A number that must not exceed a bound."""
    return Check(label, float(value), f"≤ {bound:g}", bool(value <= bound))


def at_least(label: str, value: float, bound: float) -> Check:
    """A number that must reach a bound."""
    return Check(label, float(value), f"≥ {bound:g}", bool(value >= bound))


def within(label: str, value: float, low: float, high: float) -> Check:
    """A number that must lie in a range."""
    return Check(label, float(value), f"{low:g} to {high:g}", bool(low <= value <= high))
