"""Standard errors for which examples were looked at, from one pass over them."""

import math
from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tacit.equations.rows import check_candidates
from tacit.errors import InputError
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, select
from tacit.objective.per_example import DirectionalDerivatives
from tacit.objective.randomness import split_draws
from tacit.regularizers import Regularizer
from tacit.uncertainty.design import Drift, check_order, design_scores, identical
from tacit.uncertainty.directions import Directions, balanced, known_force, signs, square_of_rows
from tacit.uncertainty.linear_fit import (
    centred_values,
    check_same,
    check_strengths,
    check_units,
    solve_again,
)
from tacit.uncertainty.sampling import Scores, covariance_of_mean

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit

__all__ = ["Directions", "Scores", "score_examples"]

SEED = 0
"""Of the random signs that the noise of the whole target is estimated along."""
PROBES, SMALL = 8, 2**16
"""Directions of such signs at most, and the entries in all of them."""


def score_examples(  # noqa: PLR0913 # the fit and what wrote it, then keyword options
    found: "Fit",
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    params: Mapping[str, Tensor] | None = None,
    known: Mapping[Regularizer, float] | None = None,
    rows: Scope = None,
    plain: Objective | None = None,
    population: float | None = None,
    clusters: Sequence[Hashable] | Tensor | None = None,
) -> Scores:
    """How much each example moves every strength, and what follows: standard errors, a bootstrap.

    λ̂ = (ΦᵀΦ)⁻¹Φᵀb is linear in the mean of the examples' gradients, so the influence of example
    i is minus the derivative of its loss along the columns of Φ(ΦᵀΦ)⁻¹: one pass for all, at
    the cost of some four forward passes and two or three more a strength. Pass what the fit was
    written with.

    The columns of `gradient_norm` and `explicit_dropout` are means over examples as well; where
    they read the same data their influence is included, at a few more passes. What a `regularizer`
    of your own reads cannot be known: its columns are held fixed.

    Args:
        found: a fit of endpoint or difference equations at one point.
        objective: what the equations were written from; the technique, for difference equations.
        regularizers: the same candidates, in the same order.
        params: the same point.
        known: the same known penalties.
        rows: the same rows.
        plain: the objective without the technique, for difference equations; its examples are
            the technique's, in the same order.
        population: how many examples these were drawn from, at random without replacement; by
            default there is no end of them.
        clusters: a label an example, where examples of one label (one patient, one document) are
            not independent of each other.
    """
    size = _whole(population)
    solved = solve_again(found, objective, plain)
    candidates = check_candidates(regularizers, known)
    point = objective.point(params)
    chosen = select(point, rows, what="rows")
    bound = candidates.bind(point)
    used = sum(int(t.count_nonzero()) for t in signs(point, bound, chosen, seed=SEED).values())
    check_same(found, objective, candidates, bound, used)
    # The noise of the whole target: in a large model from one sum that the pass has anyway, whose
    # examples must be independent; else along several directions of random signs.
    mixed = clusters is None and used > SMALL
    probes = () if mixed else range(max(1, min(PROBES, SMALL // used)))
    held = [signs(point, bound, chosen, seed=SEED + PROBES * i) for i in probes]
    directions = Directions(point, bound, chosen, solved.inverse[:, solved.free])
    _check_orders(objective, plain, labelled=clusters is not None)
    mix = balanced(objective.count, seed=SEED) if mixed else None
    taken = _target(found, objective, plain, _Joined(directions, held), point, mix)
    check_units(taken, size)
    labels = _numbered(clusters, len(taken.values))
    offset, centred = centred_values(taken)
    values = torch.zeros(len(centred), len(solved.free), dtype=torch.float64)
    count = len(directions)
    values[:, solved.free] = centred[:, :count]
    spread = covariance_of_mean(values, taken.weights, labels)
    if taken.signed_sum is not None:
        weight = len(values) if taken.weights is None else float(taken.weights.sum())
        total = square_of_rows(taken.signed_sum, point, bound, chosen) / weight**2
    else:
        noise = covariance_of_mean(centred[:, count:], taken.weights, labels)
        total = float(noise.diagonal().mean())
    check_strengths(solved, offset[:count] - known_force(point, bound, directions), values, point)
    drift = Drift(objective, plain, point, chosen, candidates, bound, found.equations.targets)
    moved, notes = design_scores(drift, directions, solved, taken.weights)
    values[:, solved.free] += moved
    along = torch.linalg.eigvalsh(solved.design @ spread @ solved.design.T)[-1]
    return Scores(
        names=tuple(found.strengths),
        strengths=dict(found.strengths),
        values=values,
        weights=taken.weights,
        population=size,
        clusters=labels,
        trace=total * len(values),
        correlation=max(1.0, float(along) / (total / used)) if total else 1.0,
        square=solved.square,
        rows=used,
        free=solved.free,
        inflation=solved.inflation,
        notes=notes,
        moving=bool(moved.any()),
    )


def with_sampling(
    found: "Fit",
    objective: Objective,
    regularizers: Regularizer | Sequence[Regularizer],
    *,
    known: Mapping[Regularizer, float] | None,
    population: float | None,
) -> "Fit":
    """An endpoint fit with error bars of sampling, where a population is given.

    Without, and where λ ≥ 0 leaves no strength free to move, it is the fit as it was.
    """
    if population is None or (found.nonnegative and not any(found.strengths.values())):
        return found
    scores = score_examples(found, objective, regularizers, known=known, population=population)
    return found.with_error_bars(scores.error_bars(), *scores.problems)


class _Joined(Sequence[Params]):
    """Directions made on demand, and some that are held."""

    def __init__(self, directions: Sequence[Params], held: Sequence[Params]):
        self.directions, self.held = directions, held

    def __len__(self) -> int:
        return len(self.directions) + len(self.held)

    def __getitem__(self, index: Any) -> Any:
        made = len(self.directions)
        return self.directions[index] if index < made else self.held[index - made]


def _whole(population: Any) -> Any:
    """Numpy's whole numbers, and 4e4, as Python's; no end of examples as None."""
    if population == math.inf:
        return None
    number = isinstance(population, Real) and not isinstance(population, bool)
    return int(float(population)) if number and float(population).is_integer() else population


def _check_orders(objective: Objective, plain: Objective | None, *, labelled: bool) -> None:
    """Refuse data whose examples cannot be paired.

    Passes over one loader are shuffled alike; over two, or beside labels, they are not.
    """
    apart = plain is not None and not identical(objective.data, plain.data)
    for given in (objective, plain):
        if given is not None and (labelled or plain is not None):
            check_order(given, shuffled=not (labelled or apart))


def _target(
    found: "Fit",
    objective: Objective,
    plain: Objective | None,
    directions: Sequence[Params],
    params: Params,
    mix: Tensor | None,
) -> DirectionalDerivatives:
    """⟨target_i, v_j⟩ of every example, before known penalties are taken off."""
    own = _mean_over_groups(objective, directions, params, found.equations.targets, mix)
    if plain is None:
        return DirectionalDerivatives(-own.values, own.weights, own.signed_sum)
    other = _mean_over_groups(plain, directions, params, found.equations.targets, mix)
    if own.values.shape != other.values.shape:
        raise InputError(
            f"the technique has {len(own.values)} examples and plain {len(other.values)}: their "
            "difference by example needs the same examples in the same order."
        )
    a, b = own.weights, other.weights
    if (a is None) is not (b is None) or (a is not None and b is not None and not a.equal(b)):
        raise InputError("the technique and plain weigh examples differently: pass equal weights.")
    apart = None
    if own.signed_sum is not None and other.signed_sum is not None:
        apart = {n: t - other.signed_sum[n] for n, t in own.signed_sum.items()}
    return DirectionalDerivatives(own.values - other.values, own.weights, apart)


def _mean_over_groups(
    objective: Objective,
    directions: Sequence[Params],
    params: Params,
    groups: int,
    mix: Tensor | None,
) -> DirectionalDerivatives:
    """The mean over groups of draws, each with equal weight, as in the target."""
    if not objective.training:
        return objective.directional_derivatives(directions, params, signs=mix)
    draws = split_draws(objective.draws, groups, paired=objective.paired)
    if len({len(group) for group in draws}) == 1:
        return objective.directional_derivatives(directions, params, signs=mix)
    parts = [
        objective.directional_derivatives(directions, params, draws=group, signs=mix)
        for group in draws
    ]
    sums = [part.signed_sum for part in parts if part.signed_sum is not None]
    mean = {n: torch.stack([own[n] for own in sums]).mean(0) for n in sums[0]} if sums else None
    return DirectionalDerivatives(
        torch.stack([part.values for part in parts]).mean(0), parts[0].weights, mean
    )


def _numbered(clusters: Sequence[Hashable] | Tensor | None, count: int) -> Tensor | None:
    """Clusters as numbers from 0, in the order of their first example."""
    if clusters is None:
        return None
    if isinstance(clusters, Tensor) and clusters.ndim != 1:
        raise InputError(
            f"clusters has shape {tuple(clusters.shape)}: pass one label an example, as a list or "
            "a tensor of one dimension."
        )
    labels = clusters.tolist() if isinstance(clusters, Tensor) else list(clusters)
    if len(labels) != count:
        raise InputError(f"clusters has {len(labels)} labels for {count} examples: pass one each.")
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    if len(numbers) < 2:
        raise InputError("all examples are in one cluster: an error needs two or more to differ.")
    return torch.tensor([numbers[label] for label in labels])
