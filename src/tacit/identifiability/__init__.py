"""What each regularizer adds to a fit, what chance would add, and whether it holds elsewhere."""

from tacit.fitting.chance import chance
from tacit.fitting.shares import ordered_shares, unique_shares
from tacit.identifiability.checkpoints import Drift, drift
from tacit.identifiability.comparison import Comparison, Difference, compare
from tacit.identifiability.nulls import Null, null_distribution
from tacit.identifiability.screening import Screen, screen

__all__ = [
    "Comparison",
    "Difference",
    "Drift",
    "Null",
    "Screen",
    "chance",
    "compare",
    "drift",
    "null_distribution",
    "ordered_shares",
    "screen",
    "unique_shares",
]
