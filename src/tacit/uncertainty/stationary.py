"""Standard errors of one endpoint for the noise of SGD, from how it fluctuates about its minimum.

Experimental: the intervals were tested on small problems only, and they are wrong where training
had not come to rest. Prefer `tacit.average_epochs` or `tacit.stack` where several epochs or runs
are available.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.errors import InputError, check_number
from tacit.fitting.error_bars import ErrorBars, mark_undetermined
from tacit.fitting.fits import Fit
from tacit.objective.params import Params, same_buffers
from tacit.regularizers import Regularizer
from tacit.uncertainty.directions import build_directions
from tacit.uncertainty.krylov import KrylovSpace
from tacit.uncertainty.linear_fit import (
    LinearFit,
    check_strengths,
    linear_fit_of,
    mean_and_deviations,
)
from tacit.uncertainty.sampling import covariance_of_mean
from tacit.validation.penalised import NoHessianError, PenalisedObjective, no_penalty

COVERAGE = "93 to 96 % of the time at rest, but 45 to 100 % where training had not come to rest"
"""How often 95 % intervals covered the truth.

At rest: ridge and tanh networks with independent batches. Otherwise: elastic nets at their last
weights.
"""
TOLERANCE = 0.01
"""The space is large enough where its last direction of each strength changes every variance by
less than this fraction."""
MAX_DIRECTIONS = 40
"""Largest number of directions, or three per strength where that is more."""


@dataclass(frozen=True)
class SgdSteps:
    """The steps of SGD: v ← momentum·v + gradient of a batch, then θ ← θ − rate·v."""

    rate: float
    batch_size: int
    momentum: float
    count: int
    """Number of examples that batches are drawn from."""

    @property
    def stability_limit(self) -> float:
        """Step size times curvature above which the iteration diverges."""
        return 2 * (1 + self.momentum)

    def noise_gain(self, curvatures: Tensor) -> Tensor:
        """Covariance of ∇F at rest over that of the batch gradients, in the eigenvectors of H.

        Let a_i(s) be the response along eigenvector i, s steps after a unit of noise, m the
        momentum and p = rate·curvature. At rest the gain is p_i p_j Σ_s a_i(s) a_j(s), which sums
        to

            p_i p_j (1 − m²) / [(1 − m)²((1 + m)(p_i + p_j) − p_i p_j) + m(p_i − p_j)²],

        or p/(2 − p) for i = j without momentum.

        Trap: a direction of negative curvature has no stationary distribution. The absolute value
        of the curvature is used there: the noise that accumulates before the point moves away.
        """
        p, m = self.rate * curvatures.abs(), self.momentum
        q = p[:, None]
        denominator = (1 - m) ** 2 * ((1 + m) * (p + q) - p * q) + m * (p - q).square()
        return torch.where(denominator > 0, p * q * (1 - m**2) / denominator, 0.0)

    def describe(self) -> str:
        """The steps in words."""
        text = f"SGD at rest with steps of {self.rate:g}"
        if self.momentum:
            text += f", momentum {self.momentum:g}"
        if self.batch_size == self.count:
            return f"{text} and all {self.count:,} examples in every batch: there is no noise"
        return f"{text} and batches of {self.batch_size:,} of {self.count:,} examples"


def stationary_error_bars(
    fit: Fit, *, rate: float, batch_size: int, momentum: float = 0.0
) -> ErrorBars:
    """Error bars for the noise of training, of one endpoint of SGD with a constant step size.

    Experimental. The last weights of such a run are one draw from a stationary distribution around
    the minimum of F = L + R. With δ the distance to the minimum, H the Hessian of F and
    D = Φ(ΦᵀΦ)⁻¹, λ̂ − λ = −DᵀHδ to first order. Without momentum, the noise of all earlier steps
    sums to

        Cov(λ̂) = η²/B·(1 − B/n) Σ_s U_sᵀ C U_s,   U_s = (I − ηH)^s H D,

    where C is the covariance of the examples' gradients. All U_s lie in the Krylov space of H
    started from D, where the sum is a product of small matrices, with momentum too
    (`SgdSteps.noise_gain`). It costs one Hessian-vector product per direction (about five per
    strength, 40 in all at most) and one or two passes over the examples. The directions are stored
    in float64, which limits models to about 10⁸ parameters.

    Traps:

    - Training must have come to rest: 95 % intervals then covered 93–96 % (ridge regressions, small
      networks), but 45–100 % for elastic nets stopped early or after 200 epochs, and 90–100 % after
      800.
    - Noise also moves the columns of the design, most near a kink (`l1` near zero, `smooth_l1`
      within about β): a bias that error bars do not show and that small steps reduce.
    - Batches are assumed to be drawn anew at every step; epochs that visit every example once have
      less noise, so that the error bars are upper bounds.
    - The curvature of penalties that are read from data (`gradient_norm`, `explicit_dropout`) is
      left out, as the basis of the error bars says.

    Args:
        fit: a fit of endpoint equations at the last weights; its objective must be over the
            examples that training drew from.
        rate: the step size η at the end of training.
        batch_size: number of examples (tokens, where the mean is over tokens) per step.
        momentum: heavy-ball momentum, as in torch.optim.SGD, without dampening or Nesterov.
    """
    linear_fit = linear_fit_of(fit, "stationary_error_bars")
    objective, bound = linear_fit.origin.setting.objective, linear_fit.bound
    if objective.unit == "batches":
        raise InputError(
            "the examples of a batch interact here, so that the noise of a step is not that of "
            "single examples: use average_epochs for error bars of training."
        )
    if linear_fit.origin.setting.mode == "difference":
        raise InputError(
            "the fit is of difference equations, which are written at fixed weights: training has "
            "no noise there. Pass a fit of endpoint equations."
        )
    check_number("rate (the step size at the end of training)", rate, above=0)
    check_number("momentum", momentum, least=0, below=1)
    whole_number = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if not whole_number or not 1 <= batch_size <= objective.count:
        raise InputError(
            f"batch_size is {batch_size!r} for {objective.count} examples: pass the number of "
            f"examples per training step, a whole number from 1 to {objective.count}."
        )
    steps = SgdSteps(float(rate), batch_size, float(momentum), objective.count)
    penalised, notes = _penalised_loss(linear_fit)
    free = linear_fit.free
    directions = build_directions(bound, linear_fit.gram_inverse[:, free])
    space = KrylovSpace(penalised.hvp_at(penalised.flatten(bound.params)), penalised.epsilon)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in bound.params.items()}
    for direction in directions:
        space.add_start(penalised.flatten(zeros | direction))

    def example_covariance() -> Tensor:
        """C in the space, from one pass."""
        basis = [penalised.unflatten(vector) for vector in space.basis[: space.size]]
        derivatives = objective.directional_derivatives(basis, bound.params)
        mean, deviations = mean_and_deviations(-derivatives.values, derivatives.weights)
        starts = space.projected_starts(space.size)
        check_strengths(linear_fit, directions, mean @ starts, deviations @ starts)
        return len(deviations) * covariance_of_mean(deviations, derivatives.weights, None)

    covariance, remarks = _converged_covariance(space, steps, example_covariance)
    wide = torch.zeros(len(free), len(free), dtype=torch.float64)
    wide[free.nonzero(), free.nonzero().T] = covariance
    wide = mark_undetermined(wide, linear_fit.inflation)
    wide[~free, :] = wide[:, ~free] = math.nan
    basis = "; ".join([steps.describe(), *remarks, *notes])
    return ErrorBars("training", basis, tuple(fit.strengths), wide, measured=COVERAGE)


def _converged_covariance(
    space: KrylovSpace, steps: SgdSteps, example_covariance: Callable[[], Tensor]
) -> tuple[Tensor, list[str]]:
    """The covariance of the strengths, from a space that is large enough, and remarks on it.

    While the space grows, |H| stands for C, which needs no pass over the data. C itself then
    decides whether the space was large enough; if not, it is doubled.
    """
    count = len(space.start_coefficients)
    most, enough = max(MAX_DIRECTIONS, 3 * count), 2 * count + 1
    while True:
        while not space.invariant and space.size < most:
            space.extend()
            curvatures = torch.linalg.eigvalsh(space.projected_matrix(space.size))
            highest, limit = steps.rate * float(curvatures[-1]), steps.stability_limit
            if highest >= limit:
                remark = (
                    f"SGD diverges: step size times curvature is {highest:.3g}, above {limit:g}"
                )
                return torch.full((count,), math.inf, dtype=torch.float64).diag(), [remark]
            if space.size >= enough and _change(space, steps, None) < TOLERANCE / 2:
                break
        C = example_covariance()
        covariance = _covariance(space, space.size, steps, C)
        change = 0.0 if space.invariant else _change(space, steps, C)
        if change < TOLERANCE:
            return covariance, []
        if space.size >= most:
            remark = f"not converged after {space.size} directions, to about {change:.0%}"
            return covariance, [remark]
        enough = max(enough, 2 * space.size)


def _covariance(space: KrylovSpace, size: int, steps: SgdSteps, C: Tensor | None) -> Tensor:
    """The covariance of the strengths in the first dimensions; without C, C = |H| and n = ∞."""
    curvatures, eigenvectors = torch.linalg.eigh(space.projected_matrix(size))
    starts = eigenvectors.T @ space.projected_starts(size)
    if C is None:
        rotated, fraction = curvatures.abs().diag(), 0.0
    else:
        rotated = eigenvectors.T @ C[:size, :size] @ eigenvectors
        fraction = steps.batch_size / steps.count
    gradients = steps.noise_gain(curvatures) * rotated
    return starts.T @ gradients @ starts * ((1 - fraction) / steps.batch_size)


def _change(space: KrylovSpace, steps: SgdSteps, C: Tensor | None) -> float:
    """The largest relative change of a variance by the last direction of each strength."""
    before, after = (
        _covariance(space, size, steps, C).diagonal()
        for size in (space.size - len(space.start_coefficients), space.size)
    )
    return float(torch.nan_to_num((after - before).abs() / after).max())


def _penalised_loss(linear_fit: LinearFit) -> tuple[PenalisedObjective, list[str]]:
    """F = L + Σ λ̂R + known penalties, and notes on penalties without a second derivative."""
    origin, bound = linear_fit.origin, linear_fit.bound
    objective, candidates = origin.setting.objective, origin.candidates
    vectors = linear_fit.strengths.split([family.size for family in bound.families])
    terms = list(zip(candidates.estimated, vectors, strict=True))
    terms += [(r, torch.tensor([float(s)])) for r, s in candidates.known.items()]

    def total(terms: list[tuple[Regularizer, Tensor]]) -> PenalisedObjective:
        def value(params: Params) -> Tensor:
            evaluated = [(r.value(params), strengths) for r, strengths in terms]
            return no_penalty(params) + sum((v * s.to(v)).sum() for v, s in evaluated)

        return PenalisedObjective(objective, value, same_buffers({}, bound.params))

    smooth, notes = [], []
    for term in terms:
        function = total([term])
        try:
            function.hvp_at(function.flatten(bound.params))
            smooth.append(term)
        except NoHessianError:
            notes.append(f"the curvature of {term[0].name} left out")
    if objective.random:
        notes.append(f"noise of a mean over {objective.draws} draws of the objective")
    return total(smooth), notes
