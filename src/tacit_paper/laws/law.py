"""What a law is: a technique, the terms that theory says it adds, and how they are estimated."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tacit import Fit
from tacit_paper import Row
from tacit_paper.problem_kinds import join_kinds


@dataclass(frozen=True)
class Law:
    """A technique whose penalties and coefficients are known."""

    technique: str
    terms: Mapping[str, str]
    """For every strength of the fit that theory knows: its term, "coefficient · penalty"."""
    source: str
    """Where the law is from: a paper, or the derivation in one line."""
    parameter: str
    """The letter of the law's parameter: a step η, a rate q, a noise σ."""
    values: tuple[float, ...]
    """Values of the parameter; the last is the limit at which the law is checked."""
    order: float
    """The order at which the error vanishes with the parameter; 0 where the law is exact."""
    draws: int
    """Number of random draws, which the presets multiply; 0 where nothing is drawn."""
    bars: str
    """The kind of error bar that says how well an estimate from random draws, batches or runs is
    known; empty where nothing is random."""
    estimate: Callable[..., "Recovered"]
    """The fit for a value of the parameter and a seed, and the coefficients in theory."""

    @property
    def name(self) -> str:
        """The name of the function that estimates it."""
        return self.estimate.__name__


@dataclass(frozen=True)
class Recovered:
    """What a law's function returns: a fit, and theory's coefficients by the name of a strength."""

    fit: Fit
    theory: Mapping[str, float]
    unit: float = 0.0
    """What errors are relative to, where theory says zero."""


def law(
    technique: str,
    terms: Mapping[str, str],
    *,
    source: str,
    parameter: str,
    values: tuple[float, ...],
    order: float = 0,
    draws: int = 0,
    bars: str = "",
) -> Callable[[Callable[..., Recovered]], Law]:
    """Turn a function of a parameter's value and a seed into a law.

    A law with `draws` hands their number to the function as its third argument, and its error bars
    are those of draws.
    """

    def make(estimate: Callable[..., Recovered]) -> Law:
        kind = bars or ("draws" if draws else "")
        return Law(technique, terms, source, parameter, values, order, draws, kind, estimate)

    return make


def laws_in(module: Any) -> list[Law]:
    """The laws that a module states, in their order."""
    return [value for value in vars(module).values() if isinstance(value, Law)]


def law_rows(law: Law, section: str, *, seeds: range, more_draws: int = 1) -> Iterator[Row]:
    """One row per seed, value of the parameter and term."""
    for seed in seeds:
        for value in law.values:
            drawn = (law.draws * more_draws,) if law.draws else ()
            recovered = law.estimate(value, seed, *drawn)
            for strength, term in law.terms.items():
                yield {
                    "section": section,
                    "law": law.name,
                    "technique": law.technique,
                    "term": term,
                    "source": law.source,
                    "parameter": law.parameter,
                    "value": value,
                    "at_limit": value == law.values[-1],
                    "order": float(law.order),
                    "seed": seed,
                    **_numbers(recovered, strength, law.bars),
                }


def _numbers(recovered: Recovered, strength: str, bars: str) -> Row:
    """Estimate and theory of a term, and the ratio of both with its 95 % interval.

    Where theory says zero, the ratio is that of 1 + estimate/unit.
    """
    fit, theory = recovered.fit, recovered.theory[strength]
    unit = theory or recovered.unit

    def ratio(estimate: float) -> float:
        return 1 + (estimate - theory) / unit

    ends = fit.intervals()[bars][strength] if bars else (math.nan, math.nan)
    low, high = sorted(map(ratio, ends)) if bars else ends
    estimate = fit.strengths[strength]
    return {
        "equations": fit.sources[0].mode,
        "theory": theory,
        "estimate": estimate,
        "ratio": ratio(estimate),
        "low": low,
        "high": high,
        "explained": fit.explained,
        "problems": join_kinds(fit.problems),
    }
