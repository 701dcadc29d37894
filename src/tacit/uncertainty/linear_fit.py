"""A fit as a linear function of its target, and checks before its examples are scored."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.equations.candidates import BoundCandidates
from tacit.equations.target import Origin, Setting, origin_of
from tacit.errors import InputError
from tacit.fitting.fits import Fit
from tacit.fitting.solving import System
from tacit.objective.objective import Objective
from tacit.objective.params import Params, coarsest_dtype
from tacit.uncertainty.directions import known_products


class LinearFit(NamedTuple):
    """A fit as a linear function of its target b: λ̂ = (ΦᵀΦ)⁻¹Φᵀb over the free strengths."""

    fit: Fit
    origin: Origin
    bound: BoundCandidates
    strengths: Tensor
    free: Tensor
    """Which strengths are free, as a mask: all but those that λ ≥ 0 holds at zero."""
    gram_inverse: Tensor
    """(ΦᵀΦ)⁻¹ over the free strengths, zero elsewhere."""
    design_factor: Tensor
    """The triangular factor of Φ."""
    inflation: Tensor
    """Variance inflation of each strength; infinite where it is not determined."""
    determined: bool
    """Whether the free columns have full rank."""
    target_square_norm: float
    """‖b‖²."""


def linear_fit_of(fit: Fit, what: str) -> LinearFit:
    """The fit as a linear function of its target.

    Refused for trajectories, changed weights, and where no strength is free; `what` is the
    function that needs it.
    """
    origin = origin_of(fit, what)
    if origin.setting.mode in ("trajectory", "accumulated"):
        raise InputError(
            f"the fit is of {origin.setting.mode} equations, but {what} needs one point with fixed "
            "weights. Fits of steps and epochs have error bars from the differences between them."
        )
    if fit.psd_binds:
        raise InputError(
            "Λ ⪰ 0 holds an eigenvalue of this fit at zero, where strengths are no linear function "
            f"of the target: pass {what} the unconstrained fit, fit.unconstrained."
        )
    count, factor = len(fit.equations.names), fit.equations.factor()
    strengths = torch.tensor(list(fit.strengths.values()), dtype=torch.float64)
    free = (strengths > 0) | ~fit.equations.bounded(nonnegative=fit.nonnegative)
    if not free.any():
        raise InputError(
            "λ ≥ 0 holds all strengths of this fit at zero, so no example changes any of them: "
            "score the unconstrained fit, fit.unconstrained."
        )
    design = factor[:, :count]
    system = System(design[:, free])
    inflation = torch.ones(count, dtype=torch.float64)
    inflation[free] = system.inflation
    gram_inverse = torch.zeros(count, count, dtype=torch.float64)
    # Solving twice keeps the condition number of the factor; forming ΦᵀΦ would square it.
    identity = torch.eye(len(factor), dtype=torch.float64)
    gram_inverse[free.nonzero(), free.nonzero().T] = system.solve(system.solve(identity).T)
    return LinearFit(
        fit=fit,
        origin=origin,
        bound=origin.bind(),
        strengths=strengths,
        free=free,
        gram_inverse=gram_inverse,
        design_factor=design,
        inflation=inflation,
        determined=system.rank == int(free.sum()),
        target_square_norm=float(factor[:, count:].mean(1).square().sum()),
    )


def check_order(setting: Setting, *, labelled: bool = False) -> None:
    """Refuse data whose examples cannot be paired: over passes, with labels, or with `plain`.

    Passes over one shuffling loader have the same order, because every pass starts from the same
    random state. Passes over two loaders, or a loader and labels beside it, do not.
    """
    scored = [o for o in (setting.objective, setting.plain) if o is not None]
    shuffled = not labelled and identical_data(scored[0], scored[-1])
    if not all(objective.repeats_order(shuffled=shuffled) for objective in scored):
        raise InputError(
            "the data comes in another order in every pass, but examples of several passes, or "
            "labels beside them, have to be paired: pass a loader that does not shuffle."
        )


def identical_data(a: Objective, b: Objective) -> bool:
    """Whether two objectives have the same data object, or tuples of the same tensors."""
    if type(a.data) is tuple and type(b.data) is tuple:
        return [id(part) for part in a.data] == [id(part) for part in b.data]
    return a.data is b.data


def mean_and_deviations(values: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The (weighted) mean over examples and the deviations from it; refused for one example."""
    if (len(values) if weights is None else int((weights > 0).sum())) < 2:
        raise InputError("only one example has weight: to estimate an error, score two or more.")
    mean = values.mean(0) if weights is None else weights @ values / weights.sum()
    return mean, values - mean


def check_strengths(
    linear_fit: LinearFit, directions: Sequence[Params], mean: Tensor, influence: Tensor
) -> None:
    """Refuse data whose mean derivatives do not give the strengths of the fit.

    `mean` is ⟨b, v_j⟩ along the directions of the free strengths, before known penalties are
    subtracted from b; `influence` has the deviations of single examples from it.
    """
    fit, bound, free = linear_fit.fit, linear_fit.bound, linear_fit.free
    strengths, recomputed = linear_fit.strengths[free], mean
    if bound.known:
        recomputed = mean - known_products(bound, directions, len(mean))
    epsilon = torch.finfo(coarsest_dtype(*bound.params.values())).eps
    tolerance = max(epsilon**0.5, min(1.0, 100 * epsilon * fit.condition))
    scale = influence.square().mean(0).sqrt() + strengths.abs()
    error = (recomputed - strengths).abs()
    # The loss may not depend on what a penalty shrinks (l2 before a layer norm): ⟨b, v_j⟩ is then
    # rounding error only.
    rounding = fit.equations.floor * linear_fit.gram_inverse.diagonal()[free].sqrt()
    if (error > tolerance * scale + rounding).any():
        worst = int((error / scale.clamp_min(torch.finfo(torch.float64).tiny)).argmax())
        name = fit.equations.names[int(free.nonzero()[worst])]
        raise InputError(
            f"recomputed from these examples, the strength of {name!r} is "
            f"{float(recomputed[worst]):.6g}, but the fit has {float(strengths[worst]):.6g}: the "
            "data has changed since the equations were written, so write them again. A loss that "
            "reads the parameters itself cannot be split by example."
        )
