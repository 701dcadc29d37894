"""The scale of a technique, such as the standard deviation of its noise."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """How strongly a technique is applied, and how its effect grows with that.

    At a small scale s the effect is c·s^k (1 + b·s^m + …): of c·s^k theory knows the penalty, the
    rest is the error of taking the first term for the whole.
    """

    name: str
    value: float
    growth: float
    """Effect at this scale over that at half of it, to leading order: 2^k."""
    order: int
    """The order m of the error."""
