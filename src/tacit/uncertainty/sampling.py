"""The influence of every example on the strengths, and the sampling error that follows from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from tacit.errors import InputError, Problem, check_whole
from tacit.fitting.error_bars import ErrorBars, mark_undetermined
from tacit.fitting.evidence import LACK_OF_FIT, NOISY
from tacit.fitting.problems import sampling_noise

COVERAGE_OF_VARYING_DESIGN = "89 to 98 % of the time where a candidate depends on the examples"
"""How often 95 % intervals covered the truth, measured by `tacit reproduce coverage`."""
COVERAGE_OF_CUSTOM = "84 % of the time where a function of your own reads the examples"
"""The same where they vary as much as the target does, and the column is treated as fixed."""
REPLICATES_AT_ONCE = 16
"""Bootstrap replicates whose counts are in memory together."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The influence ψ_i of every example on the strengths, centred to mean zero.

    Where the design does not depend on the examples, the strengths of any subset S of them are
    exactly λ̂ + mean over S of ψ_i (weighted, where examples have weights). Where columns of the
    design are themselves means over examples, ψ_i is the derivative by the example's weight, and
    the equation holds to first order.
    """

    names: tuple[str, ...]
    strengths: Mapping[str, float]
    values: Tensor = field(repr=False)
    """ψ, of shape (examples, strengths) in float64, in the order of the data."""
    weights: Tensor | None = field(repr=False)
    """Weight of each example in the mean; None where all are equal."""
    population: int | None
    """Number of examples these were drawn from without replacement; None if it is infinite."""
    clusters: Tensor | None = field(repr=False)
    """Index of the cluster of each example; None where every example is independent."""
    covariance_trace: float
    """Estimate of n·tr Cov(target): tr Cov of one example's gradient, without clusters."""
    correlation: float
    """ρ: the largest noise variance along the columns over the mean along all rows; at least 1."""
    target_square_norm: float = field(repr=False)
    """‖target‖²."""
    residual_square_norm: float = field(repr=False)
    """‖target − design·λ̂‖²."""
    residual_trace: float = field(repr=False)
    """Estimate of n·tr Cov(residual)."""
    probe_covariance: Tensor = field(repr=False)
    """Cov(⟨target, v⟩) of directions v of random signs; empty if a signed sum was used instead."""
    rows: int
    """Number of equations."""
    free: Tensor = field(repr=False)
    """Which strengths are free, as a mask: all but those that λ ≥ 0 holds at zero."""
    inflation: Tensor = field(repr=False)
    """Variance inflation, as in the fit; infinite where a strength is not determined."""
    notes: tuple[str, ...] = ()
    """Sentences for the basis of the error bars: which columns were treated as fixed."""
    design_varies: bool = False
    """Whether columns of the design are means over the scored examples."""
    custom: bool = False
    """Whether columns are of the caller's functions, which may read the scored examples."""
    unit: str = "examples"
    """What was scored: examples, or the batches of a loss whose examples interact."""

    @property
    def count(self) -> int:
        """Number of examples."""
        return len(self.values)

    @property
    def finite_population_factor(self) -> float:
        """1 − n/N, by which sampling variances shrink for a population of N; 1 if infinite."""
        return 1.0 if self.population is None else 1 - self._weighted_count / self.population

    def error_bars(self) -> ErrorBars:
        """Error bars for the random choice of examples: Cov(λ̂) = (1 − n/N)·Cov(ψ)/n."""
        covariance = covariance_of_mean(self.values, self.weights, self.clusters)
        covariance = mark_undetermined(self.finite_population_factor * covariance, self.inflation)
        covariance[~self.free, :] = covariance[:, ~self.free] = math.nan
        freedom = float((self._sums_by_unit()[1] > 0).sum()) - 1
        parts = [COVERAGE_OF_CUSTOM] * self.custom
        parts += [COVERAGE_OF_VARYING_DESIGN] * self.design_varies
        measured = ", and ".join(parts)
        basis = self._basis()
        bars = ErrorBars("sampling", basis, self.names, covariance, freedom, measured=measured)
        return replace(bars, explains_residual=self.residual_chance >= LACK_OF_FIT)

    def bootstrap(self, replicates: int = 2000, *, seed: int = 0) -> Tensor:
        """Strengths of samples drawn with replacement, (replicates, strengths); needs no pass.

        Clusters are drawn whole. Deviations shrink by √(1 − n/N) for a finite population.
        """
        check_whole("replicates", replicates)
        check_whole("seed", seed, least=0)
        sums, unit_weights = self._sums_by_unit()
        units, scale = len(sums), math.sqrt(self.finite_population_factor)
        sums_and_weights = torch.cat([sums, unit_weights[:, None]], dim=1)
        generator = torch.Generator().manual_seed(seed)
        deviations = []
        for start in range(0, replicates, REPLICATES_AT_ONCE):
            rows = min(REPLICATES_AT_ONCE, replicates - start)
            counts = torch.empty(rows, units, dtype=torch.float64)
            for row in counts:
                drawn = torch.randint(units, (units,), generator=generator, dtype=torch.int32)
                row.copy_(torch.bincount(drawn, minlength=units))
            totals = counts @ sums_and_weights
            deviations.append(scale * totals[:, :-1] / totals[:, -1:])
        return self._strengths + torch.cat(deviations)

    def leave_one_out(self) -> Tensor:
        """Strengths without each example in turn, (examples, strengths), without refitting.

        Exact where the design does not depend on the examples.
        """
        weights = self._weights[:, None]
        return self._strengths - weights * self.values / (weights.sum() - weights)

    def most_influential(self, name: str, count: int = 10) -> list[tuple[int, float]]:
        """The examples that change a strength most when left out: (index in the data, change)."""
        if name not in self.names:
            raise InputError(f"no strength {name!r}: there are {', '.join(self.names)}.")
        check_whole("count", count)
        changes = (self.leave_one_out() - self._strengths)[:, self.names.index(name)]
        largest = changes.abs().argsort(descending=True, stable=True)[:count]
        return list(zip(largest.tolist(), changes[largest].tolist(), strict=True))

    @property
    def noise_fraction(self) -> float:
        """Fraction of the target's squared norm that is sampling noise, tr Cov(target)/‖target‖².

        Trap: it is estimated along a few random directions, to within some tens of per cent.
        """
        noise = self.covariance_trace / self.count * self.finite_population_factor
        if self.target_square_norm:
            return noise / self.target_square_norm
        return math.inf if noise else 0.0

    @property
    def ceiling(self) -> float:
        """1 − noise fraction: no regularizer can be expected to explain more of the target."""
        return min(1.0, max(0.0, 1 - self.noise_fraction))

    @property
    def residual_chance(self) -> float:
        """The probability of so large a residual, if it were only sampling noise.

        ‖residual‖² over the trace of its covariance is about F(d, m·d) then, with
        d = (tr Cov)²/tr Cov² the number of independent directions of the noise, and m the number of
        random directions v from which the trace was estimated; ⟨v, Cov v′⟩² has the mean tr Cov².
        """
        from scipy.special import fdtrc

        noise = self.residual_trace / self.count * self.finite_population_factor
        if not noise:
            return float(not self.residual_square_norm)
        probes, directions = len(self.probe_covariance), self.effective_parameters
        if probes > 1:
            pairs = self.probe_covariance[~torch.eye(probes, dtype=torch.bool)]
            spread = float(pairs.square().mean())
            trace = float(self.probe_covariance.diagonal().mean())
            directions = max(1.0, trace**2 / spread) if spread else float(self.rows)
        ratio = self.residual_square_norm / noise
        return float(fdtrc(directions, max(probes, 1) * directions, ratio))

    @property
    def effective_parameters(self) -> float:
        """p/ρ: the number of equations with independent, equal noise that would be as precise."""
        return self.rows / self.correlation

    @property
    def problems(self) -> tuple[Problem, ...]:
        """A "noisy" Problem, where much of the target is sampling noise."""
        if self.noise_fraction <= NOISY:
            return ()
        numbers = {"noise": min(1.0, self.noise_fraction), "ceiling": self.ceiling}
        return (sampling_noise.report(self.names, count=self.count, **numbers),)

    @cached_property
    def _strengths(self) -> Tensor:
        return torch.tensor([self.strengths[n] for n in self.names], dtype=torch.float64)

    @cached_property
    def _weights(self) -> Tensor:
        if self.weights is None:
            return torch.ones(self.count, dtype=torch.float64)
        return self.weights

    @property
    def _weighted_count(self) -> int:
        """Number of examples with positive weight; the others count as not drawn."""
        return int((self._weights > 0).sum())

    def _sums_by_unit(self) -> tuple[Tensor, Tensor]:
        """Σ wψ and Σ w over each sampling unit: an example, or a cluster."""
        weighted = self._weights[:, None] * self.values
        return _sum_by_unit(weighted, self.clusters), _sum_by_unit(self._weights, self.clusters)

    def _basis(self) -> str:
        """What the error bars were made from, in words."""
        count, population = self._weighted_count, self.population
        if population is None:
            text = f"{count:,} {self.unit} of an infinite population"
        elif population > count:
            text = f"{count:,} of {population:,} {self.unit}"
        else:
            text = f"all {count:,} {self.unit} of the population: nothing was sampled, so there is "
            text += "no sampling error"
        if self.clusters is not None:
            text += f", in {int(self.clusters.max()) + 1:,} clusters"
        return "; ".join([text, *self.notes])


def covariance_of_mean(values: Tensor, weights: Tensor | None, clusters: Tensor | None) -> Tensor:
    """Covariance of the (weighted) mean of centred values, by examples or by clusters of them.

    Σ e eᵀ/n² · G/(G−1) with e = n w ψ / Σw, summed within each of G clusters.
    """
    count = len(values)
    weights = torch.ones(count, dtype=torch.float64) if weights is None else weights
    terms = _sum_by_unit(values * (weights * count / weights.sum())[:, None], clusters)
    units = int((_sum_by_unit(weights, clusters) > 0).sum())
    return terms.T @ terms * (units / (units - 1) / count**2)


def _sum_by_unit(values: Tensor, clusters: Tensor | None) -> Tensor:
    """Sums over the examples of each cluster; the values themselves without clusters."""
    if clusters is None:
        return values
    total = torch.zeros(int(clusters.max()) + 1, *values.shape[1:], dtype=values.dtype)
    return total.index_add_(0, clusters, values)
