"""Standard errors of one endpoint for the noise of SGD, from how it jitters about its minimum."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.equations.rows import BoundCandidates, Candidates, check_candidates
from tacit.errors import InputError
from tacit.fitting.error_bars import ErrorBars, mark_undetermined
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, select
from tacit.objective.per_example import DirectionalDerivatives
from tacit.regularizers import Regularizer
from tacit.uncertainty.directions import Directions, known_force, signs
from tacit.uncertainty.krylov import Krylov
from tacit.uncertainty.linear_fit import (
    Solved,
    centred_values,
    check_same,
    check_strengths,
    check_units,
    solve_again,
)
from tacit.uncertainty.sampling import covariance_of_mean
from tacit.validation.penalised import NoHessianError, Penalised

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit

MEASURED = "93 to 96 % of the time at rest, but 45 to 100 % where training had not come to rest"
"""Ridge and tanh networks with independent batches; elastic nets at their last weights."""
SETTLED = 0.01
"""Change of every variance by the last direction of each strength, below which no more follow."""
MOST = 40
"""Directions at most (or three a strength)."""


@dataclass(frozen=True)
class Steps:
    """How SGD steps: θ ← θ − rate·v, v ← momentum·v + gradient of a batch."""

    rate: float
    batch_size: int
    momentum: float
    count: int
    """Examples that batches are drawn from."""

    @property
    def limit(self) -> float:
        """Step size times curvature from which no rest is possible."""
        return 2 * (1 + self.momentum)

    def jitter(self, curvatures: Tensor) -> Tensor:
        """What noise of unit covariance makes of ∇F at rest, between any two eigenvectors of H.

        With h_i the response to one push, p_i p_j Σ_s h_i(s) h_j(s) for p = rate·curvature, which
        is p/(2 − p) on the diagonal without momentum. Where the curvature is negative there is no
        rest; its size is taken, for as much noise as builds up before the point has moved away.
        """
        p, kept = self.rate * curvatures.abs(), self.momentum
        q = p[:, None]
        whole = (1 - kept) ** 2 * ((1 + kept) * (p + q) - p * q) + kept * (p - q).square()
        return torch.where(whole > 0, p * q * (1 - kept**2) / whole, 0.0)

    def describe(self) -> str:
        """The steps in words."""
        text = f"SGD at rest with steps of {self.rate:g}"
        if self.momentum:
            text += f", momentum {self.momentum:g}"
        if self.batch_size == self.count:
            return f"{text} and all {self.count:,} examples in a batch: there is no noise"
        return f"{text} and batches of {self.batch_size:,} of {self.count:,} examples"


def stationary_error_bars(  # noqa: PLR0913 # the fit and what wrote it, then how it was trained
    found: "Fit",
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    rate: float,
    batch_size: int,
    momentum: float = 0.0,
    params: Mapping[str, Tensor] | None = None,
    known: Mapping[Regularizer, float] | None = None,
    rows: Scope = None,
) -> ErrorBars:
    """Error bars for the noise of training, of one endpoint of SGD with a constant step.

    The last weights of such a run are one draw from a cloud around the minimum of F = L + R. With
    δ the distance to it and D = Φ(ΦᵀΦ)⁻¹, λ̂ − λ = −DᵀHδ, H the Hessian of F, and without momentum

        covariance = η²/B·(1 − B/n) Σ_s U_sᵀ C U_s,   U_s = (I − ηH)^s H D,

    C the covariance of single examples' gradients; H and C need not commute. All U_s lie in the
    Krylov space of H from D, where small matrices tell the whole sum, momentum included. It takes
    a Hessian product for each direction (some five a strength in networks, 40 in all at most) and
    one pass for the derivatives of examples along all of them (one more, where C shows that they
    were too few). As many parameter-sized vectors are held in float64: it is for models of up to
    some 10⁸ parameters.

    Nominal 95 % intervals covered 93–96 % of the time for ridge regressions and small networks that
    ran until they were at rest. Traps:

    - A run that still moves is off by more: intervals of elastic nets covered 45–100 % where
      patience or the 200th epoch had stopped them, and 90–100 % after 800 epochs.
    - It is of first order. Noise moves the columns of the design along with the gradient, and the
      more so across a bend (about β under `smooth_l1`, about 0 under `l1`): a bias, which no error
      bar tells, and which shrinks with the step size faster than the error does.
    - Batches are taken to be drawn anew at every step. Epochs that see every example once have less
      noise along what is slower than an epoch: error bars are then upper bounds.
    - The curvature of penalties that are read from data (`gradient_norm`, `explicit_dropout`) is
      left out, as the basis says.

    Args:
        found: a fit of endpoint equations at the last weights.
        objective: what the equations were written from, over the examples that training drew from.
        regularizers: the same candidates, in the same order.
        rate: the step size η at the end of training.
        batch_size: how many examples (tokens, where the mean is over tokens) a step saw.
        momentum: heavy-ball momentum, as torch.optim.SGD has it, without dampening or Nesterov.
        params: the same point.
        known: the same known penalties.
        rows: the same rows.
    """
    solved = _endpoint(found, objective)
    candidates = check_candidates(regularizers, known)
    point = objective.point(params)
    chosen = select(point, rows, what="rows")
    bound = candidates.bind(point)
    used = sum(int(t.count_nonzero()) for t in signs(point, bound, chosen, seed=0).values())
    check_same(found, objective, candidates, bound, used)
    steps = _checked(rate, batch_size, momentum, objective.count)
    function, notes = _total(objective, candidates, bound, solved, point)
    directions = Directions(point, bound, chosen, solved.inverse[:, solved.free])
    space = Krylov(function.curvature(function.flat(point)), function.epsilon)
    for j in range(len(directions)):
        space.start(function.flat(_whole(directions[j], point)))

    def noise(size: int) -> Tensor:
        """C over the first vectors of the space, by one pass."""
        taken = objective.directional_derivatives(
            [function.unflat(q) for q in space.vectors[:size]], point
        )
        check_units(taken, None)
        offset, centred = centred_values(DirectionalDerivatives(-taken.values, taken.weights))
        start = space.starts(size)
        again = offset @ start - known_force(point, bound, directions)
        values = torch.zeros(len(centred), len(solved.free), dtype=torch.float64)
        values[:, solved.free] = centred @ start
        check_strengths(solved, again, values, point)
        return len(centred) * covariance_of_mean(centred, taken.weights, None)

    covariance, more = _settled(space, steps, noise)
    full = torch.zeros(len(solved.free), len(solved.free), dtype=torch.float64)
    full[solved.free.nonzero(), solved.free.nonzero().T] = covariance
    full = mark_undetermined(full, solved.inflation)
    full[~solved.free, :] = full[:, ~solved.free] = math.nan
    basis = "; ".join([steps.describe(), *more, *notes])
    return ErrorBars("training", basis, solved.names, full, measured=MEASURED)


def _settled(
    space: Krylov, steps: Steps, noise: Callable[[int], Tensor]
) -> tuple[Tensor, list[str]]:
    """The covariance in a space that is large enough, and what is to be said of it.

    While the space grows, H stands for C, which costs no pass; C itself then tells whether it was
    enough.
    """
    most, least = max(MOST, 3 * len(space.first)), 0
    while True:
        reached = _grown(space, steps, least, most)
        if reached >= steps.limit:
            return _unstable(len(space.first), reached, steps)
        size = len(space.images)
        seen = noise(size)
        covariance = _covariance(space, size, steps, seen)
        change = 0.0 if space.whole else _change(space, size, steps, seen)
        if change < SETTLED:
            return covariance, []
        if size >= most:
            return covariance, [f"not settled after {size} directions, within about {change:.0%}"]
        least = 2 * size


def _grown(space: Krylov, steps: Steps, least: int, most: int) -> float:
    """Let the space grow until it seems enough; the highest step size times curvature in it."""
    reached, enough = 0.0, max(least, 2 * len(space.first) + 1)
    while not space.whole and len(space.images) < most and reached < steps.limit:
        space.grow()
        size = len(space.images)
        reached = steps.rate * float(torch.linalg.eigvalsh(space.curvature(size))[-1])
        if size >= enough and _change(space, size, steps, None) < SETTLED / 2:
            break
    return reached


def _covariance(space: Krylov, size: int, steps: Steps, noise: Tensor | None) -> Tensor:
    """The covariance of the strengths in the first dimensions; noise None is C = |H|, n = ∞."""
    values, vectors = torch.linalg.eigh(space.curvature(size))
    start = vectors.T @ space.starts(size)
    inner = values.abs().diag() if noise is None else vectors.T @ noise[:size, :size] @ vectors
    part = 0.0 if noise is None else steps.batch_size / steps.count
    return start.T @ (steps.jitter(values) * inner) @ start * ((1 - part) / steps.batch_size)


def _change(space: Krylov, size: int, steps: Steps, noise: Tensor | None) -> float:
    """The largest relative change of a variance by the last direction of each strength."""
    after = _covariance(space, size, steps, noise).diagonal()
    before = _covariance(space, size - len(space.first), steps, noise).diagonal()
    return float(torch.nan_to_num((after - before).abs() / after).max())


def _unstable(count: int, reached: float, steps: Steps) -> tuple[Tensor, list[str]]:
    covariance = torch.zeros(count, count, dtype=torch.float64)
    covariance.fill_diagonal_(math.inf)
    words = (
        f"no rest is possible, as steps times curvature reach {reached:.3g} and "
        f"{steps.limit:g} is too much"
    )
    return covariance, [words]


def _total(
    objective: Objective,
    candidates: Candidates,
    bound: BoundCandidates,
    solved: Solved,
    point: Params,
) -> tuple[Penalised, list[str]]:
    """F = L + Σ λ̂R + known penalties, for its curvature, and what has none to be had."""
    sizes = [family.size for family in bound.families]
    terms = list(zip(candidates.estimated, solved.strengths.split(sizes), strict=True))
    terms += [(r, torch.tensor([float(s)])) for r, s in candidates.known.items()]

    def summed(parts: Sequence[tuple[Regularizer, Tensor]]) -> Penalised:
        def value(params: Params) -> Tensor:
            zero = (0 * next(iter(params.values()))).sum()
            added = [(r.value(params), own) for r, own in parts]
            return zero + sum((values * own.to(values)).sum() for values, own in added)

        return Penalised(objective, value)

    def bends(term: tuple[Regularizer, Tensor]) -> bool:
        if term[0].influence is not None:  # read from data, by functions that have one derivative
            return False
        function = summed([term])
        try:
            function.curvature(function.flat(point))
        except NoHessianError:
            return False
        return True

    kept = [term for term in terms if bends(term)]
    names = [r.name for r, _ in terms if all(r is not other for other, _ in kept)]
    notes = [f"the curvature of {name} left out" for name in names]
    if objective.training:
        notes.append(f"noise of a mean over {objective.draws} draws of the objective")
    return summed(kept), notes


def _whole(direction: Params, point: Params) -> Params:
    return {n: direction[n] if n in direction else torch.zeros_like(p) for n, p in point.items()}


def _endpoint(found: "Fit", objective: Objective) -> Solved:
    """The fit as a linear function of its target; refused where it is not one endpoint's."""
    from tacit.fitting.fits import Fit

    modes = [source.mode for source in found.sources] if isinstance(found, Fit) else []
    if modes == ["difference"]:
        raise InputError(
            "the fit is of difference equations, at fixed weights: that training ended elsewhere "
            "is not their error. Pass a fit of endpoint equations."
        )
    return solve_again(found, objective, None)


def _checked(rate: float, batch_size: int, momentum: float, count: int) -> Steps:
    for name, value in (("rate", rate), ("momentum", momentum)):
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise InputError(f"{name} is {value!r}: pass a finite number.")
    if rate <= 0:
        raise InputError(f"rate is {rate!r}: pass the step size at the end of training, above 0.")
    if not 0 <= momentum < 1:
        raise InputError(f"momentum is {momentum!r}: pass a number from 0 to below 1.")
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if not whole or not 1 <= batch_size <= count:
        raise InputError(
            f"batch_size is {batch_size!r} for {count} examples: pass the whole number of them "
            "that a training step saw, from 1 to all."
        )
    return Steps(float(rate), batch_size, float(momentum), count)
