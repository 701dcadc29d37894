"""What the paper says about deviations along the trajectory, and what decides it."""

from tacit_paper import Claim, Evidence, Table
from tacit_paper.trajectory_deviations.checks import BOTH, explained_parts


def _measure_deviations(rows: Table) -> Evidence:
    redrawn, epochs = explained_parts(rows)
    steps, mean_of_epochs = float(redrawn.together.max()), float(epochs.explained[BOTH])
    draws = f"{redrawn.draws.max():,.0f}"
    text = (
        f"explained: ≤ {_percent(steps)} of single steps ({draws} draws); "
        f"{_percent(mean_of_epochs)} of whole epochs' mean"
    )
    return Evidence(text, steps <= 0.01 and mean_of_epochs >= 0.98)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if fraction < 0.1 else f"{100 * fraction:.1f} %"


CLAIMS = (
    Claim(
        "Minibatch steps deviate from the full-batch gradient; the implicit regularization "
        "underlying these deviations can be modeled.",
        "Figure 2",
        "holds with a caveat",
        _measure_deviations,
        "A single step deviates only by noise of mean zero; a penalty shows in the mean of whole "
        "shuffled epochs, against the gradient flow.",
    ),
)
