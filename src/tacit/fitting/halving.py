"""The error of a finite step size, or of a technique's scale, from the fits at it and at half."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tacit.equations.difference import difference_target
from tacit.equations.equations import Equations
from tacit.equations.sources import Source
from tacit.equations.target import origin_of, write_equations
from tacit.errors import InputError

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit


def halved_equations(fit: "Fit") -> Equations:
    """The equations of a technique's difference again, with the technique at half its scale.

    Candidates, point, seeds and groups of draws are the same.
    """
    origin = origin_of(fit, "with_halved")
    setting = origin.setting
    scale, at_scale, plain = setting.scale, setting.objective.at_scale, setting.plain
    if scale is None or at_scale is None or plain is None:
        raise InputError(
            "with_halved() needs a fit of difference_equations(technique, plain, …) whose "
            "technique has a scale and was applied to this same plain objective, as in technique = "
            "tacit.techniques.sam(plain, rho). For a trajectory, pass the fit at half the step "
            "size: of Trajectory.halved()."
        )
    if origin.point is None:
        raise InputError("the equations are of several points: pass equations of one point.")
    origin.point.check_unchanged()
    target = difference_target(
        at_scale(scale.value / 2),
        plain,
        params=origin.point.params,
        groups=setting.groups,
    )
    return write_equations(target.setting, target.points, origin.candidates, origin.rows)


def check_halved(fit: "Fit", halved: "Fit") -> None:
    """Refuse fits that are not of the same steps or technique, at the full and at half the size."""
    sizes = [[size for source in f.sources for size in _sizes(source)] for f in (fit, halved)]
    alike = 0 < len(sizes[0]) == len(sizes[1])
    compared = zip(*sizes, strict=True) if alike else [(0.0, 0.0)]
    same_steps = (fit.strengths.keys(), fit.rows) == (halved.strengths.keys(), halved.rows)
    if not same_steps or not all(
        whole > 0 and math.isclose(half, whole / 2, rel_tol=1e-6) for whole, half in compared
    ):
        raise InputError(
            "the other fit is not of the same steps at half the size, compared with a flow: pass "
            "tacit.fit(tacit.trajectory_equations(objective, trajectory.halved(), …, "
            "reference=tacit.rk4())), with the regularizers of this one. For a technique with a "
            "scale, call with_halved() without another fit."
        )


def _sizes(source: Source) -> tuple[float, ...]:
    """The step sizes, or the scale of the technique."""
    return source.step_sizes if source.scale is None else (source.scale.value,)


def scaled_strengths(fit: "Fit", halved: Mapping[str, float]) -> dict[str, float]:
    """The strengths at half the size, scaled to the full size.

    With a technique all grow as the law of its scale. With steps some halve with the step, and are
    doubled, and others do not.
    """
    scale, strengths = fit.sources[0].scale, fit.strengths
    if scale is not None:
        return {name: half * scale.growth for name, half in halved.items()}
    return {
        name: half * (2 if abs(half) < abs(strengths[name]) / math.sqrt(2) else 1)
        for name, half in halved.items()
    }


def step_errors(fit: "Fit", halved: Mapping[str, float]) -> dict[str, float]:
    """The error to leading order, from the distance to the scaled strengths at half the size.

    With λ(η) = η^a (c + bη^m + …) the distance λ(η) − 2^a λ(η/2) is 1 − 2^−m of η^a · bη^m; m = 1
    for steps.
    """
    scale = fit.sources[0].scale
    part = 1 - 0.5 ** (1 if scale is None else scale.order)
    scaled = scaled_strengths(fit, halved)
    return {name: abs(strength - scaled[name]) / part for name, strength in fit.strengths.items()}
