"""Key numbers of the trajectory figure, computed only from its rows."""

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most


def check(rows: Table) -> list[Check]:
    """Minibatch steps deviate; full-batch steps do not, and their fit reports no signal."""
    full_batch = rows[rows.unit == "full batch"]
    minibatch_deviation = _largest_deviation(rows[rows.unit == "minibatch"])
    no_signal = bool((full_batch.problems == "no signal").all())
    return [
        at_least("largest relative deviation, minibatches", minibatch_deviation, 0.1),
        at_most("largest relative deviation, full batch", _largest_deviation(full_batch), 1e-12),
        Check("full batch is reported as 'no signal' (1: yes)", float(no_signal), "1", no_signal),
    ]


def _largest_deviation(rows: Table) -> float:
    """Largest deviation from the full gradient's step, relative to the largest such step."""
    deviation = (rows.moved_w - rows.expected_w) ** 2 + (rows.moved_b - rows.expected_b) ** 2
    expected = rows.expected_w**2 + rows.expected_b**2
    return float((deviation.max() / expected.max()) ** 0.5)
