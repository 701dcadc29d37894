"""What every example pulls a strength to, and how strengths vary over samples of examples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tacit.errors import InputError, Problem
from tacit.fitting.error_bars import ErrorBars, mark_undetermined

NOISY = 0.15
"""Part of the target's squared norm that is sampling noise, above which it is a Problem."""
MOVING = "89 to 98 % of the time where a candidate depends on the examples itself"
"""In `tacit reproduce coverage`, where error bars follow such a column to first order."""
TOGETHER = 16
"""Replicates of a bootstrap whose counts are held at once."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The influence ψ_i of every example on the strengths, centred: their mean is zero.

    With the design held fixed, the strengths of any subset S of the examples are exactly
    λ̂ + mean over S of ψ_i (weighted, where examples have weights). Where the design is itself a
    mean over examples, ψ_i is the derivative by the example's weight, and that holds to first
    order.
    """

    names: tuple[str, ...]
    strengths: Mapping[str, float]
    values: Tensor = field(repr=False)
    """ψ, (examples, strengths) in float64, in the order of the data."""
    weights: Tensor | None = field(repr=False)
    """What each example weighs in the mean; None where all weigh the same."""
    population: int | None
    """How many examples these were drawn from, without replacement; None for no end of them."""
    clusters: Tensor | None = field(repr=False)
    """Number of the cluster that each example belongs to; None where each is on its own."""
    trace: float
    """Estimate of n·tr Cov of the target (tr Cov of an example's gradient, where unclustered)."""
    correlation: float
    """ρ: the largest noise variance along the columns over the mean along all rows; at least 1."""
    square: float = field(repr=False)
    """‖target‖²."""
    rows: int
    """How many equations there are."""
    free: Tensor = field(repr=False)
    """Which strengths could move: not those that λ ≥ 0 holds at zero."""
    inflation: Tensor = field(repr=False)
    """As in the fit; infinite where a strength is not determined."""
    notes: tuple[str, ...] = ()
    """What was held fixed, in words."""
    moving: bool = False
    """Whether columns of the design are means over the examples themselves."""

    @property
    def count(self) -> int:
        """How many examples there are."""
        return len(self.values)

    @property
    def sampled(self) -> float:
        """1 − n/N, by which a variance shrinks where the population is finite."""
        return 1.0 if self.population is None else 1 - self._drawn / self.population

    def error_bars(self) -> ErrorBars:
        """Standard errors of the strengths for which examples were drawn: (1 − n/N)·Cov(ψ)/n."""
        covariance = self.sampled * covariance_of_mean(self.values, self.weights, self.clusters)
        covariance = mark_undetermined(covariance, self.inflation)
        held = ~self.free
        covariance[held, :] = covariance[:, held] = math.nan
        return ErrorBars(
            "sampling", self._basis(), self.names, covariance, self._units - 1.0,
            measured=MOVING if self.moving else "",
        )  # fmt: skip

    def bootstrap(self, replicates: int = 2000, *, seed: int = 0) -> Tensor:
        """Strengths of samples drawn with replacement, (replicates, strengths), without a pass.

        Clusters are drawn whole. Deviations shrink by √(1 − n/N) where the population is finite.
        """
        for name, number, least in (("replicates", replicates, 1), ("seed", seed, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise InputError(f"{name} is {number!r}: pass a whole number, at least {least}.")
        shares, sizes = self._sums()
        units, scale = len(shares), math.sqrt(self.sampled)
        both = torch.cat([shares, sizes[:, None]], dim=1)
        generator = torch.Generator().manual_seed(seed)
        found = []
        for start in range(0, replicates, TOGETHER):
            counts = torch.empty(min(TOGETHER, replicates - start), units, dtype=torch.float64)
            for row in counts:
                drawn = torch.randint(units, (units,), generator=generator, dtype=torch.int32)
                row.copy_(torch.bincount(drawn, minlength=units))
            totals = counts @ both
            found.append(scale * totals[:, :-1] / totals[:, -1:])
        return self._point + torch.cat(found)

    def leave_one_out(self) -> Tensor:
        """Strengths without each example in turn, (examples, strengths): exact, not refitted."""
        if self.count < 2:
            raise InputError("leaving one example out of one leaves none: score more examples.")
        weights = self._weights[:, None]
        return self._point - weights * self.values / (weights.sum() - weights)

    def most_influential(self, name: str, count: int = 10) -> list[tuple[int, float]]:
        """Examples that move a strength most when left out: their place in the data, the change."""
        if name not in self.names:
            raise InputError(f"no strength {name!r}: there are {', '.join(self.names)}.")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"count is {count!r}: pass a whole number, at least 1.")
        change = (self.leave_one_out() - self._point)[:, self.names.index(name)]
        chosen = change.abs().argsort(descending=True, stable=True)[:count]
        return list(zip(chosen.tolist(), change[chosen].tolist(), strict=True))

    @property
    def noise(self) -> float:
        """Part of the target's squared norm that is sampling noise, tr Cov/n·(1 − n/N)/‖target‖².

        From a few random directions: right to some parts in ten, not to digits.
        """
        whole = self.trace / self.count * self.sampled
        return whole / self.square if self.square else math.inf if whole else 0.0

    @property
    def ceiling(self) -> float:
        """1 − noise: no regularizer can be expected to explain more of the target."""
        return min(1.0, max(0.0, 1 - self.noise))

    @property
    def effective_parameters(self) -> float:
        """p/ρ, how many independent equations of equal noise would tell the strengths as well."""
        return self.rows / self.correlation

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What speaks against the fit because of the examples."""
        if self.noise <= NOISY:
            return ()
        return (
            Problem(
                "noisy",
                f"About {min(1.0, self.noise):.0%} of the target's squared norm is which examples "
                "happened to be looked at: on others, no regularizer can explain more than about "
                f"{self.ceiling:.0%}.",
                "Use more examples, or read the explained fraction against that ceiling. Where the "
                "model was trained on exactly these examples nothing was sampled: pass "
                f"population={self.count}.",
                self.names,
            ),
        )

    @cached_property
    def _point(self) -> Tensor:
        return torch.tensor([self.strengths[n] for n in self.names], dtype=torch.float64)

    @cached_property
    def _weights(self) -> Tensor:
        if self.weights is None:
            return torch.ones(self.count, dtype=torch.float64)
        return self.weights

    @property
    def _drawn(self) -> int:
        """Examples with weight: others were not looked at."""
        return int((self._weights > 0).sum())

    @property
    def _units(self) -> int:
        """What was drawn: examples, or clusters, with weight."""
        return int((self._sums()[1] > 0).sum())

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Σ wψ and Σ w of what is drawn: examples, or clusters."""
        weights = self._weights
        shares = weights[:, None] * self.values
        if self.clusters is None:
            return shares, weights
        return _by_cluster(shares, self.clusters), _by_cluster(weights, self.clusters)

    def _basis(self) -> str:
        count, all_ = f"{self._drawn:,}", self.population
        if all_ == self._drawn:
            text = (
                f"all {count} examples of the population: nothing was sampled, so sampling is "
                "not the error"
            )
        elif all_ is None:
            text = f"{count} examples of an unlimited population"
        else:
            text = f"{count} of {all_:,} examples"
        if self.clusters is not None:
            text += f", in {int(self.clusters.max()) + 1:,} clusters"
        return "; ".join([text, *self.notes])


def covariance_of_mean(values: Tensor, weights: Tensor | None, clusters: Tensor | None) -> Tensor:
    """Cov of the (weighted) mean of centred values, by examples or by clusters of them.

    Σ e eᵀ/n² · G/(G−1) with e = n w ψ / Σw, summed within each of G clusters.
    """
    count = len(values)
    parts = values if weights is None else values * (weights * count / weights.sum())[:, None]
    heavy = torch.ones(count) if weights is None else (weights > 0).double()
    parts = parts if clusters is None else _by_cluster(parts, clusters)
    heavy = heavy if clusters is None else _by_cluster(heavy, clusters)
    units = int((heavy > 0).sum())
    return parts.T @ parts * (units / (units - 1) / count**2)


def _by_cluster(values: Tensor, clusters: Tensor) -> Tensor:
    total = torch.zeros(int(clusters.max()) + 1, *values.shape[1:], dtype=values.dtype)
    return total.index_add_(0, clusters, values)
