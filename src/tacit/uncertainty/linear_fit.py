"""A fit as a linear function of its target, and whether what is scored is what was fitted."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tacit.equations.rows import BoundCandidates, Candidates
from tacit.errors import InputError
from tacit.fitting.solving import System
from tacit.objective.checks import coarsest_dtype
from tacit.objective.objective import Objective
from tacit.objective.params import Params, shorten
from tacit.objective.per_example import DirectionalDerivatives

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit


class Solved(NamedTuple):
    """A fit as a linear function of its target."""

    names: tuple[str, ...]
    strengths: Tensor
    free: Tensor
    """Which strengths could move: not those that λ ≥ 0 holds at zero."""
    inverse: Tensor
    """(ΦᵀΦ)⁻¹ over the free strengths, zero elsewhere."""
    design: Tensor
    """The triangular factor of Φ."""
    inflation: Tensor
    determined: bool
    """Whether the free columns have full rank."""
    condition: float
    square: float
    """‖target‖²."""
    floor: float
    """Norm of a target that would be rounding alone."""


def solve_again(found: "Fit", objective: Objective, plain: Objective | None) -> Solved:
    """The fit as a linear function of its target; refused where it is not one of one point."""
    from tacit.fitting.fits import Fit

    if not isinstance(found, Fit):
        raise InputError(f"found is a {type(found).__name__}: pass what tacit.fit returned.")
    for given in (objective, plain):
        if not isinstance(given, Objective) and (given is not None or given is objective):
            raise InputError(
                f"an objective is a {type(given).__name__}: pass tacit.Objective(model, loss, "
                "data)."
            )
    modes = [source.mode for source in found.sources]
    if len(modes) > 1 or modes[0] not in ("endpoint", "difference"):
        kind = f"{len(modes)} stacked sources" if len(modes) > 1 else f"{modes[0]} equations"
        raise InputError(
            f"the fit is of {kind}: the influence of an example is for one point, at fixed "
            "weights. Score each endpoint's own fit; steps and stacked points have error bars of "
            "their own, from how they differ."
        )
    if (modes[0] == "difference") is (plain is None):
        raise InputError(
            f"the fit is of {modes[0]} equations and plain is {'not ' * (plain is None)}given: "
            "pass the technique as the objective and plain= for difference equations, and no "
            "plain= for endpoint equations."
        )
    count = len(found.equations.names)
    factor = found.equations.factor()
    strengths = torch.tensor(list(found.strengths.values()), dtype=torch.float64)
    free = strengths > 0 if found.nonnegative else torch.ones(count, dtype=torch.bool)
    if not free.any():
        raise InputError(
            "λ ≥ 0 holds all strengths of this fit at zero, so that no example moves one: score "
            "the free fit, found.unconstrained."
        )
    whole, system = factor[:, :count], System(factor[:, :count][:, free])
    inflation = torch.ones(count, dtype=torch.float64)
    inflation[free] = system.inflation
    inverse = torch.zeros(count, count, dtype=torch.float64)
    # Solving twice keeps the condition of the factor, which (ΦᵀΦ)⁻¹ formed at once squares.
    half = system.solve(torch.eye(len(factor), dtype=torch.float64))
    inverse[free.nonzero(), free.nonzero().T] = system.solve(half.T)
    square = float(factor[:, count:].mean(1).square().sum())
    full = system.rank == int(free.sum())
    names = tuple(found.strengths)
    return Solved(
        names, strengths, free, inverse, whole, inflation, full, found.condition, square,
        found.equations.floor,
    )  # fmt: skip


def check_same(
    found: "Fit", objective: Objective, candidates: Candidates, bound: BoundCandidates, used: int
) -> None:
    """Refuse regularizers, data or options other than those of the equations."""
    names, source = bound.columns.names, found.sources[0]
    if names != tuple(found.strengths):
        raise InputError(
            f"the fit has the strengths {shorten(found.strengths)}, and the regularizers given "
            f"have {shorten(names)}: pass the ones that the equations were written with."
        )
    given = {r.name: float(strength) for r, strength in candidates.known.items()}
    if given != source.known:
        raise InputError(
            f"known is {given or 'nothing'}, and the equations were written with "
            f"{source.known or 'nothing'}: pass the same."
        )
    if used != found.rows:
        raise InputError(
            f"there are {used} rows here and {found.rows} in the fit: pass the params= and rows= "
            "that the equations were written with."
        )
    if objective.count != source.examples:
        raise InputError(
            f"the objective has {objective.count} examples and the fit {source.examples}: pass the "
            "objective that the equations were written from."
        )


def centred_values(taken: DirectionalDerivatives) -> tuple[Tensor, Tensor]:
    """The (weighted) mean over examples, and the deviations from it."""
    if taken.weights is None:
        mean = taken.values.mean(0)
    else:
        mean = taken.weights @ taken.values / taken.weights.sum()
    return mean, taken.values - mean


def check_strengths(solved: Solved, again: Tensor, values: Tensor, params: Params) -> None:
    """Refuse where the derivatives' mean does not give the strengths of the fit."""
    eps = torch.finfo(coarsest_dtype(*params.values())).eps
    slack = max(eps**0.5, min(1.0, 100 * eps * solved.condition))
    sizes = values[:, solved.free].square().mean(0).sqrt() + solved.strengths[solved.free].abs()
    apart = (again - solved.strengths[solved.free]).abs()
    # Under a penalty that the loss does not feel (l2 before a layer norm) all of it is rounding.
    rounding = solved.floor * solved.inverse.diagonal()[solved.free].sqrt()
    if (apart > slack * sizes + rounding).any():
        worst = int((apart / sizes.clamp_min(torch.finfo(torch.float64).tiny)).argmax())
        name = solved.names[int(solved.free.nonzero()[worst])]
        raise InputError(
            f"scored anew, the strength of {name!r} is {float(again[worst]):.6g}, and the fit has "
            f"{float(solved.strengths[solved.free][worst]):.6g}: pass the objective, params=, "
            "known= and rows= that the equations were written with, on data that has not changed. "
            "A loss that reads the parameters itself cannot be scored by example."
        )


def check_units(taken: DirectionalDerivatives, population: int | None) -> None:
    """Refuse too few examples, or a population smaller than they are."""
    weights = taken.weights
    count = len(taken.values) if weights is None else int((weights > 0).sum())
    if count < 2:
        raise InputError(
            "one example with weight has no spread to estimate an error from: score more."
        )
    if population is None:
        return
    if isinstance(population, bool) or not isinstance(population, int) or population < count:
        raise InputError(
            f"population is {population!r} for {count} examples: pass the whole number of examples "
            "that these were drawn from, or inf where there is no end of them."
        )
