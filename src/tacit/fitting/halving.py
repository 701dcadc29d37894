"""The error of a finite step size, from the fits at the full and at half the step size."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tacit.errors import InputError

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit


def check_halved(fit: "Fit", halved: "Fit") -> None:
    """Refuse fits that are not of the same steps, at the full and at half the step size."""
    sizes = [[size for source in f.sources for size in source.step_sizes] for f in (fit, halved)]
    alike = 0 < len(sizes[0]) == len(sizes[1])
    compared = zip(*sizes, strict=True) if alike else [(0.0, 0.0)]
    same_steps = (fit.strengths.keys(), fit.rows) == (halved.strengths.keys(), halved.rows)
    if not same_steps or not all(
        whole > 0 and math.isclose(half, whole / 2, rel_tol=1e-6) for whole, half in compared
    ):
        raise InputError(
            "the other fit is not of the same steps at half the size, compared with a flow: pass "
            "tacit.fit(tacit.trajectory_equations(objective, trajectory.halved(), …, "
            "reference=tacit.rk4())), with the regularizers of this one."
        )


def scaled_strengths(
    strengths: Mapping[str, float], halved: Mapping[str, float]
) -> dict[str, float]:
    """The strengths at half the step, doubled where they halved with the step."""
    return {
        name: half * (2 if abs(half) < abs(strengths[name]) / math.sqrt(2) else 1)
        for name, half in halved.items()
    }


def step_errors(strengths: Mapping[str, float], halved: Mapping[str, float]) -> dict[str, float]:
    """Twice the distance between the strengths and those at half the step.

    With λ(η) = η^a (c + bη + …), a = 0 or 1, the distance λ(η) − 2^a λ(η/2) is half of η^a · bη.
    """
    scaled = scaled_strengths(strengths, halved)
    return {name: 2 * abs(strength - scaled[name]) for name, strength in strengths.items()}
