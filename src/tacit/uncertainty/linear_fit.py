"""A fit as a linear function of its target, and checks before its examples are scored."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.equations.target import Origin, origin_of
from tacit.errors import InputError
from tacit.fitting.fits import Fit
from tacit.fitting.solving import System
from tacit.objective.objective import Objective
from tacit.objective.params import Params, coarsest_dtype
from tacit.objective.per_example import DirectionalDerivatives
from tacit.uncertainty.directions import EquationRows


def scored_origin(fit: Fit, what: str) -> Origin:
    """What a fit was written from; refused unless it is of endpoint or difference equations."""
    origin = origin_of(fit, what)
    if origin.setting.mode == "trajectory":
        raise InputError(
            f"the fit is of trajectory equations, but {what} needs one point with fixed weights. "
            "Fits of steps and of epochs already have error bars, from the differences between "
            "them."
        )
    return origin


def check_orders(origin: Origin, *, labelled: bool) -> None:
    """Refuse data whose examples cannot be paired with labels, or with those of `plain`.

    Passes over one shuffling loader have the same order, because every pass starts from the same
    random state. Passes over two loaders, or a loader and labels beside it, do not.
    """
    objective, plain = origin.setting.objective, origin.setting.plain
    two_loaders = plain is not None and not identical_data(objective, plain)
    for scored in (objective, plain):
        if scored is not None:
            check_order(scored, shuffled=not (labelled or two_loaders))


def check_order(objective: Objective, *, shuffled: bool = True) -> None:
    """Refuse data that comes in another order in every pass, so that examples cannot be paired."""
    if not objective.repeats_order(shuffled=shuffled):
        raise InputError(
            "the data comes in another order in every pass, but examples of several passes, or "
            "labels beside them, have to be paired: pass a loader that does not shuffle."
        )


def identical_data(a: Objective, b: Objective) -> bool:
    """Whether two objectives have the same data object, or tuples of the same tensors."""
    if type(a.data) is tuple and type(b.data) is tuple:
        same = (x is y for x, y in zip(a.data, b.data, strict=False))
        return len(a.data) == len(b.data) and all(same)
    return a.data is b.data


class LinearFit(NamedTuple):
    """A fit as a linear function of its target b: λ̂ = (ΦᵀΦ)⁻¹Φᵀb over the free strengths."""

    names: tuple[str, ...]
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
    condition: float
    target_square_norm: float
    """‖b‖²."""
    rounding_norm: float
    """Norm of a target that would consist of rounding errors only."""


def linear_fit_of(fit: Fit) -> LinearFit:
    """The fit as a linear function of its target; refused where no strength is free."""
    count = len(fit.equations.names)
    factor = fit.equations.factor()
    strengths = torch.tensor(list(fit.strengths.values()), dtype=torch.float64)
    free = strengths > 0 if fit.nonnegative else torch.ones(count, dtype=torch.bool)
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
        names=tuple(fit.strengths),
        strengths=strengths,
        free=free,
        gram_inverse=gram_inverse,
        design_factor=design,
        inflation=inflation,
        determined=system.rank == int(free.sum()),
        condition=fit.condition,
        target_square_norm=float(factor[:, count:].mean(1).square().sum()),
        rounding_norm=fit.equations.floor,
    )


def mean_and_deviations(derivatives: DirectionalDerivatives) -> tuple[Tensor, Tensor]:
    """The (weighted) mean over examples and the deviations from it; refused for one example."""
    values, weights = derivatives.values, derivatives.weights
    if (len(values) if weights is None else int((weights > 0).sum())) < 2:
        raise InputError(
            "only one example has weight, and an error cannot be estimated from it: score two or "
            "more."
        )
    mean = values.mean(0) if weights is None else weights @ values / weights.sum()
    return mean, values - mean


def check_strengths(
    linear_fit: LinearFit,
    rows: EquationRows,
    directions: Sequence[Params],
    mean: Tensor,
    influence: Tensor,
) -> None:
    """Refuse data whose mean derivatives do not give the strengths of the fit.

    `mean` is ⟨b, v_j⟩ along the directions of the free strengths, before known penalties are
    subtracted from b; `influence` has the deviations of single examples from it.
    """
    free, strengths = linear_fit.free, linear_fit.strengths[linear_fit.free]
    recomputed = mean
    if rows.bound.known:
        recomputed = mean - rows.known_products(directions, len(mean))
    epsilon = torch.finfo(coarsest_dtype(*rows.bound.params.values())).eps
    tolerance = max(epsilon**0.5, min(1.0, 100 * epsilon * linear_fit.condition))
    scale = influence.square().mean(0).sqrt() + strengths.abs()
    error = (recomputed - strengths).abs()
    # The loss may not depend on what a penalty shrinks (l2 before a layer norm): ⟨b, v_j⟩ is then
    # rounding error only.
    rounding = linear_fit.rounding_norm * linear_fit.gram_inverse.diagonal()[free].sqrt()
    if (error > tolerance * scale + rounding).any():
        worst = int((error / scale.clamp_min(torch.finfo(torch.float64).tiny)).argmax())
        name = linear_fit.names[int(free.nonzero()[worst])]
        raise InputError(
            f"recomputed from these examples, the strength of {name!r} is "
            f"{float(recomputed[worst]):.6g}, but the fit has {float(strengths[worst]):.6g}: the "
            "data has changed since the equations were written, so write them again. A loss that "
            "reads the parameters itself cannot be split by example."
        )
