"""A fit as a linear function of its target, and checks that it belongs to the arguments beside it.

Scores and stationary error bars are given a fit and, a second time, what its equations were
written from. `check_setting` refuses arguments that differ from those of the equations;
`check_strengths` refuses data that no longer gives the strengths of the fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.equations.rows import Candidates, check_candidates
from tacit.errors import InputError
from tacit.fitting.fits import Fit
from tacit.fitting.solving import System
from tacit.objective.checks import coarsest_dtype
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, shorten
from tacit.objective.per_example import DirectionalDerivatives
from tacit.regularizers import Regularizer
from tacit.uncertainty.directions import EquationRows


@dataclass(frozen=True, eq=False)
class Setting:
    """What the equations of a fit were written from."""

    objective: Objective
    plain: Objective | None
    """The objective without the technique, for difference equations."""
    candidates: Candidates
    params: Params
    rows: EquationRows
    draw_groups: int
    """Number of groups of draws; the target is the mean over them."""


def check_setting(
    fit: Fit,
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    params: Mapping[str, Tensor] | None,
    known: Mapping[Regularizer, float] | None,
    rows: Scope,
    plain: Objective | None = None,
) -> Setting:
    """The setting of a fit at one point; arguments that its equations did not have are refused.

    Trap: names, counts and known strengths are compared here, but not the data. Other data of the
    same size is only noticed by `check_strengths`, after the pass over it.
    """
    _check_types(fit, objective, plain)
    _check_mode(fit, plain)
    candidates = check_candidates(regularizers, known)
    bound = candidates.bind(objective.point(params), rows)
    equation_rows = EquationRows(bound)
    names, source = bound.columns.names, fit.sources[0]
    if names != tuple(fit.strengths):
        raise InputError(
            f"the fit has the strengths {shorten(fit.strengths)}, but the regularizers have "
            f"{shorten(names)}: pass the regularizers that the equations were written with."
        )
    if bound.known_strengths != source.known:
        raise InputError(
            f"known is {bound.known_strengths or 'empty'}, but the equations were written with "
            f"{source.known or 'no known penalties'}: pass the same known=."
        )
    if equation_rows.count != fit.rows:
        raise InputError(
            f"there are {equation_rows.count} equations here and {fit.rows} in the fit: pass the "
            "params= and rows= that the equations were written with."
        )
    if objective.count != source.examples:
        raise InputError(
            f"the objective has {objective.count} examples and the fit has {source.examples}: pass "
            "the objective that the equations were written from."
        )
    return Setting(objective, plain, candidates, bound.params, equation_rows, fit.equations.targets)


def _check_types(fit: Any, objective: Any, plain: Any) -> None:
    if not isinstance(fit, Fit):
        raise InputError(f"fit is a {type(fit).__name__}: pass a Fit, which tacit.fit returns.")
    for name, value in {"objective": objective, "plain": plain}.items():
        if not isinstance(value, Objective) and not (name == "plain" and value is None):
            raise InputError(
                f"{name} is a {type(value).__name__}: pass tacit.Objective(model, loss, data)."
            )


def _check_mode(fit: Fit, plain: Objective | None) -> None:
    """Refuse a fit of several points or of a trajectory, and a `plain` that does not match."""
    modes = [source.mode for source in fit.sources]
    if len(modes) > 1 or modes[0] not in ("endpoint", "difference"):
        equations = f"{len(modes)} stacked sources" if len(modes) > 1 else f"{modes[0]} equations"
        raise InputError(
            f"the fit is of {equations}, but the influence of an example is defined at one point "
            "with fixed weights. Score the fit of each endpoint separately; fits of steps and of "
            "stacked points already have error bars, from the differences between them."
        )
    if (modes[0] == "difference") is (plain is None):
        raise InputError(
            f"the fit is of {modes[0]} equations and plain is {'not ' * (plain is None)}given: "
            "for difference equations pass the technique as the objective and plain=; for endpoint "
            "equations leave plain= out."
        )


def check_orders(setting: Setting, *, labelled: bool) -> None:
    """Refuse data whose examples cannot be paired with labels, or with those of `plain`.

    Passes over one shuffling loader have the same order, because every pass starts from the same
    random state. Passes over two loaders, or a loader and labels beside it, do not.
    """
    objective, plain = setting.objective, setting.plain
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
            f"{float(recomputed[worst]):.6g}, but the fit has {float(strengths[worst]):.6g}: pass "
            "the objective, params=, known= and rows= that the equations were written with, on "
            "data that has not changed. A loss that reads the parameters itself cannot be split "
            "by example."
        )
