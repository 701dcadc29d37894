"""Key numbers of the trajectory figure, computed only from its rows."""

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most, within

BOTH = "‖∇L‖², variance of ∇L"
"""The candidate set whose strengths are known for whole epochs."""


def check(rows: Table) -> list[Check]:
    """Minibatch steps deviate by noise only; the mean of whole epochs follows two penalties."""
    full_batch = rows[rows.unit == "full batch"]
    minibatch_deviation = _largest_deviation(rows[rows.unit == "minibatch"])
    no_signal = bool((full_batch.problems == "no signal").all())
    redrawn, epochs = explained_parts(rows)
    full_batch_deviation = _largest_deviation(full_batch)
    return [
        at_least("largest relative deviation, minibatches", minibatch_deviation, 0.1),
        at_most("largest relative deviation, full batch", full_batch_deviation, 1e-12),
        Check("full batch is reported as 'no signal' (1: yes)", float(no_signal), "1", no_signal),
        at_most(
            "largest explained fraction of all draws of the batches together",
            redrawn.together.max(), 0.01, tests="protocol",
        ),
        at_least(f"shuffled epochs: explained by {BOTH}", epochs.explained[BOTH], 0.999),
        within("shuffled epochs: strength of ‖∇L‖² over η/4", epochs.ratio_norm[BOTH], 0.95, 1.05),
        within(
            "shuffled epochs: strength of the variance over η/4",
            epochs.ratio_variance[BOTH], 0.85, 1.1,
        ),
    ]  # fmt: skip


def explained_parts(rows: Table) -> tuple[Table, Table]:
    """What each candidate set explains of redrawn steps, and of shuffled epochs."""
    by_candidates = rows[rows.unit.isin(("redrawn", "epochs"))].set_index("candidates")
    redrawn = by_candidates.unit == "redrawn"
    return by_candidates[redrawn], by_candidates[~redrawn]


def _largest_deviation(rows: Table) -> float:
    """Largest deviation from the full gradient's step, relative to the largest such step."""
    deviation = (rows.moved_w - rows.expected_w) ** 2 + (rows.moved_b - rows.expected_b) ** 2
    expected = rows.expected_w**2 + rows.expected_b**2
    return float((deviation.max() / expected.max()) ** 0.5)
