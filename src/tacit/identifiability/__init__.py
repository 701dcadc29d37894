"""Which regularizers a fit can tell apart, what each adds, and what chance would add."""

from tacit.fitting.chance import chance
from tacit.fitting.shares import ordered_shares, unique_shares
from tacit.identifiability.checkpoints import Drift, drift
from tacit.identifiability.comparison import Comparison, Difference, compare
from tacit.identifiability.nulls import Null, null_distribution

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
