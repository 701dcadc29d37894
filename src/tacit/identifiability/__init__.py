"""Which regularizers a fit can tell apart, what each adds, and what chance would add."""

from tacit.identifiability.comparison import Comparison, Difference, compare
from tacit.identifiability.drift import Drift, drift
from tacit.identifiability.nulls import Null, null_distribution
from tacit.identifiability.shares import chance, ordered_shares, unique_shares

__all__ = [
    "Comparison",
    "Difference",
    "Drift",
    "Null",
    "chance",
    "compare",
    "drift",
    "null_distribution",
    "ordered_shares",
    "unique_shares",
]
