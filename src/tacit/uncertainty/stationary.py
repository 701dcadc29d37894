"""Standard errors of one endpoint for the noise of SGD, from how it fluctuates about its minimum.

Experimental: the intervals were tested on small problems only, and they are wrong where training
had not come to rest. Prefer `tacit.average_epochs` or `tacit.stack` where several epochs or runs
are available.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from tacit.equations.target import Origin
from tacit.errors import InputError
from tacit.fitting.error_bars import ErrorBars, mark_undetermined
from tacit.fitting.fits import Fit
from tacit.objective.params import Params
from tacit.objective.per_example import DirectionalDerivatives
from tacit.regularizers import Regularizer
from tacit.uncertainty.directions import EquationRows
from tacit.uncertainty.krylov import KrylovSpace
from tacit.uncertainty.linear_fit import (
    LinearFit,
    check_strengths,
    linear_fit_of,
    mean_and_deviations,
    scored_origin,
)
from tacit.uncertainty.sampling import covariance_of_mean
from tacit.validation.penalised import NoHessianError, PenalisedObjective

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
    D = Φ(ΦᵀΦ)⁻¹, λ̂ − λ = −DᵀHδ to first order. Summing the noise of all earlier steps gives,
    without momentum,

        Cov(λ̂) = η²/B·(1 − B/n) Σ_s U_sᵀ C U_s,   U_s = (I − ηH)^s H D,

    where C is the covariance of the gradients of single examples; H and C need not commute. All U_s
    lie in the Krylov space of H started from D. There the sum is a product of small matrices, with
    momentum too (`SgdSteps.noise_gain`). The cost is one Hessian-vector product per direction
    (about five per strength in networks, 40 in all at most) and one pass for the derivatives of the
    examples along all directions (a second one, where C shows that there were too few directions).
    The directions are stored in float64, which limits models to about 10⁸ parameters.

    Nominal 95 % intervals contained the true strength 93–96 % of the time for ridge regressions and
    small networks that were trained until they were at rest.

    Traps:

    - A run that still moves has a larger error: intervals of elastic nets contained the true
      strength 45–100 % of the time where early stopping or the 200th epoch ended training, and
      90–100 % after 800 epochs.
    - The error is of first order. Noise also moves the columns of the design, most strongly near a
      kink (within about β of zero under `smooth_l1`, near zero under `l1`). That is a bias, which
      error bars do not show; it shrinks with the step size faster than the error does.
    - Batches are assumed to be drawn anew at every step. Epochs that visit every example once have
      less noise at time scales longer than an epoch, so the error bars are then upper bounds.
    - The curvature of penalties that are read from data (`gradient_norm`, `explicit_dropout`) is
      left out, and the basis of the error bars says so.

    Args:
        fit: a fit of endpoint equations at the last weights; its objective must be over the
            examples that training drew from.
        rate: the step size η at the end of training.
        batch_size: number of examples (tokens, where the mean is over tokens) per step.
        momentum: heavy-ball momentum, as in torch.optim.SGD, without dampening or Nesterov.
    """
    origin = scored_origin(fit, "stationary_error_bars")
    if origin.setting.mode == "difference":
        raise InputError(
            "the fit is of difference equations, which are written at fixed weights: the noise of "
            "training is not their error. Pass a fit of endpoint equations."
        )
    rows, objective = EquationRows(origin.bind()), origin.setting.objective
    linear_fit = linear_fit_of(fit)
    steps = _check_steps(rate, batch_size, momentum, objective.count)
    penalised, notes = _penalised_loss(origin, rows, linear_fit)
    point, free = rows.bound.params, linear_fit.free
    directions = rows.directions(linear_fit.gram_inverse[:, free])
    space = KrylovSpace(penalised.hvp_at(penalised.flatten(point)), penalised.epsilon)
    for j in range(len(directions)):
        space.add_start(penalised.flatten(_with_all_names(directions[j], point)))

    def noise(size: int) -> Tensor:
        """C in the first `size` basis vectors, from one pass."""
        basis = [penalised.unflatten(vector) for vector in space.basis[:size]]
        derivatives = objective.directional_derivatives(basis, point)
        target = DirectionalDerivatives(-derivatives.values, derivatives.weights)
        mean, deviations = mean_and_deviations(target)
        starts = space.projected_starts(size)
        check_strengths(linear_fit, rows, directions, mean @ starts, deviations @ starts)
        return len(deviations) * covariance_of_mean(deviations, derivatives.weights, None)

    covariance, remarks = _converged_covariance(space, steps, noise)
    wide = torch.zeros(len(free), len(free), dtype=torch.float64)
    wide[free.nonzero(), free.nonzero().T] = covariance
    wide = mark_undetermined(wide, linear_fit.inflation)
    wide[~free, :] = wide[:, ~free] = math.nan
    basis = "; ".join([steps.describe(), *remarks, *notes])
    return ErrorBars("training", basis, linear_fit.names, wide, measured=COVERAGE)


def _converged_covariance(
    space: KrylovSpace, steps: SgdSteps, noise: Callable[[int], Tensor]
) -> tuple[Tensor, list[str]]:
    """The covariance of the strengths, from a space that is large enough, and remarks on it.

    While the space grows, |H| stands for C, which needs no pass over the data. C itself then
    decides whether the space was large enough; if not, it is doubled.
    """
    most, least = max(MAX_DIRECTIONS, 3 * len(space.start_coefficients)), 0
    while True:
        highest = _extend_space(space, steps, least, most)
        if highest >= steps.stability_limit:
            return _unstable_covariance(len(space.start_coefficients), highest, steps)
        size = space.size
        example_covariance = noise(size)
        covariance = _covariance(space, size, steps, example_covariance)
        change = 0.0 if space.invariant else _change(space, size, steps, example_covariance)
        if change < TOLERANCE:
            return covariance, []
        if size >= most:
            return covariance, [f"not converged after {size} directions, to about {change:.0%}"]
        least = 2 * size


def _extend_space(space: KrylovSpace, steps: SgdSteps, least: int, most: int) -> float:
    """Extend the space until it seems large enough; return the highest rate·curvature in it."""
    highest, enough = 0.0, max(least, 2 * len(space.start_coefficients) + 1)
    while not space.invariant and space.size < most and highest < steps.stability_limit:
        space.extend()
        size = space.size
        highest = steps.rate * float(torch.linalg.eigvalsh(space.projected_matrix(size))[-1])
        if size >= enough and _change(space, size, steps, None) < TOLERANCE / 2:
            break
    return highest


def _covariance(space: KrylovSpace, size: int, steps: SgdSteps, noise: Tensor | None) -> Tensor:
    """The covariance of the strengths in the first dimensions; without noise, C = |H| and n = ∞."""
    curvatures, eigenvectors = torch.linalg.eigh(space.projected_matrix(size))
    starts = eigenvectors.T @ space.projected_starts(size)
    if noise is None:
        rotated, fraction = curvatures.abs().diag(), 0.0
    else:
        rotated = eigenvectors.T @ noise[:size, :size] @ eigenvectors
        fraction = steps.batch_size / steps.count
    gradients = steps.noise_gain(curvatures) * rotated
    return starts.T @ gradients @ starts * ((1 - fraction) / steps.batch_size)


def _change(space: KrylovSpace, size: int, steps: SgdSteps, noise: Tensor | None) -> float:
    """The largest relative change of a variance by the last direction of each strength."""
    after = _covariance(space, size, steps, noise).diagonal()
    smaller = size - len(space.start_coefficients)
    before = _covariance(space, smaller, steps, noise).diagonal()
    return float(torch.nan_to_num((after - before).abs() / after).max())


def _unstable_covariance(count: int, highest: float, steps: SgdSteps) -> tuple[Tensor, list[str]]:
    """Infinite variances, for steps that are too large for the curvature."""
    covariance = torch.zeros(count, count, dtype=torch.float64)
    covariance.fill_diagonal_(math.inf)
    remark = (
        f"SGD diverges: step size times curvature reaches {highest:.3g}, above the limit of "
        f"{steps.stability_limit:g}"
    )
    return covariance, [remark]


def _penalised_loss(
    origin: Origin, rows: EquationRows, linear_fit: LinearFit
) -> tuple[PenalisedObjective, list[str]]:
    """F = L + Σ λ̂R + known penalties, and notes on penalties without a second derivative."""
    candidates, objective = origin.candidates, origin.setting.objective
    bound, point = rows.bound, rows.bound.params
    sizes = [family.size for family in bound.families]
    terms = list(zip(candidates.estimated, linear_fit.strengths.split(sizes), strict=True))
    terms += [(r, torch.tensor([float(s)])) for r, s in candidates.known.items()]

    def total(selected: Sequence[tuple[Regularizer, Tensor]]) -> PenalisedObjective:
        def value(params: Params) -> Tensor:
            zero = (0 * next(iter(params.values()))).sum()
            evaluated = [(r.value(params), strengths) for r, strengths in selected]
            return zero + sum((values * s.to(values)).sum() for values, s in evaluated)

        return PenalisedObjective(objective, value)

    def has_hessian(term: tuple[Regularizer, Tensor]) -> bool:
        if term[0].influence is not None:  # penalties on data can be differentiated only once
            return False
        function = total([term])
        try:
            function.hvp_at(function.flatten(point))
        except NoHessianError:
            return False
        return True

    smooth = [term for term in terms if has_hessian(term)]
    names = [r.name for r, _ in terms if all(r is not other for other, _ in smooth)]
    notes = [f"the curvature of {name} left out" for name in names]
    if objective.training:
        notes.append(f"noise of a mean over {objective.draws} draws of the objective")
    return total(smooth), notes


def _with_all_names(direction: Params, point: Params) -> Params:
    """The direction with zeros for the tensors that it does not have."""
    return {n: direction[n] if n in direction else torch.zeros_like(p) for n, p in point.items()}


def _check_steps(rate: float, batch_size: int, momentum: float, count: int) -> SgdSteps:
    for name, value in (("rate", rate), ("momentum", momentum)):
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise InputError(f"{name} is {value!r}: pass a finite number.")
    if rate <= 0:
        raise InputError(f"rate is {rate!r}: pass the step size at the end of training, above 0.")
    if not 0 <= momentum < 1:
        raise InputError(f"momentum is {momentum!r}: pass a number from 0 to below 1.")
    whole_number = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if not whole_number or not 1 <= batch_size <= count:
        raise InputError(
            f"batch_size is {batch_size!r} for {count} examples: pass the number of examples per "
            f"training step, a whole number from 1 to {count}."
        )
    return SgdSteps(float(rate), batch_size, float(momentum), count)
