"""Two fits apart: differences of strengths, their error bars, and whether chance explains them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tacit.display import Column, Format, Note, Summary, Table, render
from tacit.display.frames import make_frame
from tacit.display.numbers import show_interval
from tacit.equations.sources import Family
from tacit.errors import InputError, Problem, ProblemKind
from tacit.fitting.error_bars import KINDS, ErrorBars, welch_freedoms
from tacit.fitting.summary import (
    MAX_INTERVALS,
    MAX_ROWS,
    is_doubtful,
    jsonable,
    merge_similar,
    write_number,
)
from tacit.objective.params import shorten

if TYPE_CHECKING:
    from pandas import DataFrame

    from tacit.fitting.fits import Fit

LEVEL = 0.05
"""Level of the tests in the summary, for all strengths of a kind together."""
HIDING = (
    ProblemKind.NO_SIGNAL,
    ProblemKind.OBJECTIVE,
    ProblemKind.UNEXPLAINED,
    ProblemKind.UNIDENTIFIED,
    ProblemKind.UNSETTLED,
    ProblemKind.DRIFTING,
)
"""Problems of a fit that error bars do not contain."""


@dataclass(frozen=True)
class FitDifference:
    """Strengths of two independent fits apart; see `Fit.difference`. All numbers are floats."""

    strengths: Mapping[str, tuple[float, float]]
    """Of the first fit and of the other, for the regularizers that both have."""
    error_bars: Mapping[str, ErrorBars] = field(repr=False, compare=False)
    """Of the differences, by the kinds that both fits have (without `layers`)."""
    problems: tuple[Problem, ...]
    """What was not compared, and which problems of the two fits concern what was."""
    doubtful: bool
    """Whether one of the fits explains less than half of its target, or has no signal."""

    @property
    def differences(self) -> dict[str, float]:
        """The first fit's strengths minus the other's."""
        return {name: first - second for name, (first, second) in self.strengths.items()}

    @property
    def standard_errors(self) -> dict[str, dict[str, float]]:
        """Standard errors of the differences by kind, then by regularizer."""
        return {kind: bars.standard_errors for kind, bars in self.error_bars.items()}

    @property
    def freedoms(self) -> dict[str, dict[str, float]]:
        """Degrees of freedom of the t distribution by kind, then by regularizer."""
        return {
            kind: dict(zip(bars.names, bars.freedoms, strict=True))
            for kind, bars in self.error_bars.items()
        }

    def intervals(self, level: float = 0.95) -> dict[str, dict[str, tuple[float, float]]]:
        """Two-sided intervals of the differences by kind, then by regularizer."""
        return {k: bars.intervals(self.differences, level) for k, bars in self.error_bars.items()}

    @property
    def p_values(self) -> dict[str, dict[str, float]]:
        """How probable a difference as large is by chance alone, by kind, then by regularizer.

        Two-sided, of a t statistic. NaN where a fit does not determine the strength or its error.
        """
        return {
            kind: {
                name: p_value(difference, self.standard_errors[kind][name], freedoms[name])
                for name, difference in self.differences.items()
            }
            for kind, freedoms in self.freedoms.items()
        }

    def beyond_chance(self, level: float = LEVEL) -> dict[str, tuple[str, ...]]:
        """By kind, the regularizers whose difference chance does not explain at this level.

        Holm's correction allows for several strengths: if all are equal, one is named with a
        probability of at most `level`.
        """
        return {kind: _rejected(by_name, level) for kind, by_name in self.p_values.items()}

    def summary(self, format: Format = "text") -> str:
        """A table for each kind of error bars, and the problems, ready to print.

        Args:
            format: "text", "markdown", "latex" (with the package booktabs), or "html".
        """
        content = Summary(
            title="tacit: difference of two fits, first − other",
            lead=tuple(_lead(self)),
            tables=tuple(_table(self, kind) for kind in self.error_bars or [None]),
            problems=merge_similar(self.problems),
            no_problems="No problems found.",
        )
        return render(content, format)

    def _repr_html_(self) -> str:
        return self.summary("html")

    def to_frame(self) -> "DataFrame":
        """One row per strength, as a DataFrame of pandas.

        `name`, `first`, `other`, `difference`, and for every kind of error bars `…_error`, `…_low`
        and `…_high`, the ends of the 95 % interval, and `…_p`.
        """
        intervals, p_values = self.intervals(), self.p_values
        rows = []
        for name, (first, other) in self.strengths.items():
            row = {"name": name, "first": first, "other": other, "difference": first - other}
            for kind, errors in self.standard_errors.items():
                row[f"{kind}_error"] = errors[name]
                row[f"{kind}_low"], row[f"{kind}_high"] = intervals[kind][name]
                row[f"{kind}_p"] = p_values[kind][name]
            rows.append(row)
        return make_frame(rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON; infinite numbers become None."""
        names = ("strengths", "differences", "standard_errors", "freedoms", "p_values", "doubtful")
        plain = {name: getattr(self, name) for name in names}
        problems = [asdict(problem) for problem in self.problems]
        return jsonable(plain | {"intervals": self.intervals(), "problems": problems})

    def __str__(self) -> str:
        return self.summary()


def difference_of(fit: "Fit", other: "Fit") -> FitDifference:
    """The strengths of two fits apart; see `Fit.difference`."""
    _check_independent(fit, other)
    families, other_families = _family_of_each(fit), _family_of_each(other)
    shared = [n for n, f in families.items() if _comparable(f, other_families.get(n))]
    if not shared:
        raise InputError(
            f"the fits have no regularizer in common: this one has {shorten(fit.strengths)}, the "
            f"other {shorten(other.strengths)}. Fit both with the same regularizers."
        )
    strengths = {name: (fit.strengths[name], other.strengths[name]) for name in shared}
    both = {
        kind: _combine(bars, other.error_bars[kind], shared)
        for kind, bars in fit.error_bars.items()
        if kind in other.error_bars and kind != "layers"
    }
    problems = (
        *_not_compared(families, other_families, shared),
        *_bounded(fit, other, shared),
        *_without_error_bars(fit, other, both),
        *_problems_of(fit, "this fit", shared),
        *_problems_of(other, "the other fit", shared),
    )
    return FitDifference(strengths, both, problems, is_doubtful(fit) or is_doubtful(other))


def _check_independent(fit: "Fit", other: "Fit") -> None:
    if not isinstance(other, type(fit)):
        raise InputError(f"other is a {type(other).__name__}: pass another Fit.")
    if any(source in other.sources for source in fit.sources):
        raise InputError(
            "both fits are of the same weights and data: they are not independent, and their "
            "variances do not add up. Pass a fit of another run. To compare sets of regularizers "
            "on the same equations, call tacit.identifiability.compare; strengths of the same fit "
            "have the covariance Fit.error_bars[kind].covariance."
        )


def _family_of_each(fit: "Fit") -> dict[str, Family]:
    families = [family for family in fit.equations.families for _ in range(family.size)]
    return dict(zip(fit.strengths, families, strict=True))


def _comparable(family: Family, other: Family | None) -> bool:
    """Whether two strengths of one name are of the same penalty."""
    if other is None:
        return False
    one, two = ((f.kind, f.definition, f.shape) for f in (family, other))
    return one == two


def _combine(bars: ErrorBars, other: ErrorBars, shared: list[str]) -> ErrorBars:
    """Error bars of the differences: variances add up, degrees of freedom after Welch."""
    covariances, freedoms = [], []
    for part in (bars, other):
        places = torch.tensor([part.names.index(name) for name in shared])
        covariances.append(part.covariance[places[:, None], places])
        every = part.freedoms or (part.freedom,) * len(part.names)
        freedoms.append(torch.tensor(every, dtype=torch.float64)[places])
    variances: Tensor = torch.stack([covariance.diagonal() for covariance in covariances])
    combined = tuple(welch_freedoms(variances, torch.stack(freedoms)).tolist())
    basis = f"{bars.basis} (first) and {other.basis} (other)"
    return replace(
        bars,
        basis=f"{bars.basis} (each fit)" if bars.basis == other.basis else basis,
        names=tuple(shared),
        covariance=covariances[0] + covariances[1],
        freedom=min(combined),
        freedoms=combined,
        measured=bars.measured or other.measured,
        explains_residual=False,
    )


def p_value(difference: float, error: float, freedom: float) -> float:
    """Of a t statistic, two-sided; NaN where there is no standard error."""
    from scipy.special import ndtr, stdtr

    if not math.isfinite(error):
        return math.nan
    if not error:
        return 0.0 if difference else 1.0
    t = -abs(difference / error)
    return float(2 * (ndtr(t) if math.isinf(freedom) else stdtr(freedom, t)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number, by Holm's method: reject those of at most the level."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _rejected(p_values: Mapping[str, float], level: float) -> tuple[str, ...]:
    """Names that Holm's method rejects; those without a p-value are no tests."""
    tested = {name: p for name, p in p_values.items() if not math.isnan(p)}
    adjusted = holm([*tested.values()])
    return tuple(name for name, p in zip(tested, adjusted, strict=True) if p <= level)


def _not_compared(
    families: Mapping[str, Family], others: Mapping[str, Family], shared: list[str]
) -> Iterator[Problem]:
    for here, there, which in ((families, others, "this"), (others, families, "the other")):
        if only := tuple(name for name in here if name not in there):
            yield Problem(
                "not compared",
                f"only {which} fit has {shorten(only)}: a strength beside other candidates is "
                "another quantity.",
                "Fit both with the same regularizers.",
                only,
            )
    if unlike := tuple(n for n in families if n in others and n not in shared):
        one, two = families[unlike[0]].describe(), others[unlike[0]].describe()
        yield Problem(
            "not compared",
            f"{shorten(unlike)} of the two fits are not the same penalties: {one} and {two}.",
            "Fit both with the same regularizers, of the same options and knots.",
            unlike,
        )


def _bounded(fit: "Fit", other: "Fit", shared: list[str]) -> Iterator[Problem]:
    """Constraints of one of the fits, whose error bars know nothing of a boundary."""
    for one, which in ((fit, "this fit"), (other, "the other fit")):
        bounded = one.equations.bounded(nonnegative=one.nonnegative).tolist()
        named = zip(one.strengths, bounded, strict=True)
        if at_zero := tuple(n for n, b in named if b and n in shared and one.strengths[n] <= 0):
            yield Problem(
                "bounded",
                f"a bound keeps {shorten(at_zero)} of {which} at zero, where strengths have no "
                "error bars.",
                "Compare the free fits, Fit.unconstrained.",
                at_zero,
            )
        if one.psd_binds:
            message = (
                f"Λ ⪰ 0 keeps an eigenvalue of {which} at zero, where there are no error bars."
            )
            yield Problem("bounded", message, "Compare the free fits, Fit.unconstrained.")


def _without_error_bars(
    fit: "Fit", other: "Fit", both: Mapping[str, ErrorBars]
) -> Iterator[Problem]:
    if both:
        return
    kinds = [
        " and ".join(kind for kind in one.error_bars if kind != "layers") or "none"
        for one in (fit, other)
    ]
    yield Problem(
        "no error bars",
        f"the fits have no kind of error bars in common (this fit: {kinds[0]}; the other: "
        f"{kinds[1]}): whether chance explains the differences is not known.",
        "Use several epochs of each run (tacit.average_epochs), several runs (tacit.stack), or "
        "tacit.score_examples for both.",
    )


def _problems_of(fit: "Fit", which: str, shared: list[str]) -> Iterator[Problem]:
    """The problems of a fit that hide a strength that was compared."""
    for problem in fit.problems:
        if problem.kind in HIDING and (not problem.names or {*problem.names} & {*shared}):
            yield replace(problem, message=f"({which}) {problem.message}")


def _lead(difference: FitDifference) -> list[str]:
    """Which differences chance does not explain."""
    sentences = []
    for kind, beyond in difference.beyond_chance().items():
        p_values = difference.p_values[kind]
        within = [n for n, p in p_values.items() if n not in beyond and not math.isnan(p)]
        chance, texts = f"{KINDS[kind]} alone", []
        if beyond:
            texts.append(f"{shorten(beyond)}: more than {chance} explains.")
        if within:
            texts.append(f"{shorten(within)}: {chance} can explain the difference.")
        sentences += [" ".join(texts)] if texts else []
    if difference.doubtful:
        sentences.append("Differences in parentheses are of fits that explain too little.")
    return sentences


def _table(difference: FitDifference, kind: str | None) -> Table:
    """One row per regularizer, with the error bars of one kind."""
    names = list(difference.strengths)
    columns = [
        Column("regularizer", 11, "left"),
        Column("first", 12),
        Column("other", 12),
        Column("difference", 14),
    ]
    if kind is not None:
        columns += [Column(f"±{kind}", 11), Column("p", 10)]
    rows: list[tuple[str, ...]] = []
    for name in names[:MAX_ROWS]:
        first, other = difference.strengths[name]
        apart = f"{first - other:.4g}"
        cells = [f"{first:.5g}", f"{other:.5g}", f"({apart})" if difference.doubtful else apart]
        if kind is not None:
            p = difference.p_values[kind][name]
            error = write_number(difference.standard_errors[kind][name])
            cells += [error, "–" if math.isnan(p) else f"{p:.2g}"]
        rows.append((name, *cells))
    if len(names) > MAX_ROWS:
        rows.append((f"… and {len(names) - MAX_ROWS} more (FitDifference.differences has all)",))
    notes = () if kind is None else tuple(_describe(difference, kind))
    return Table(tuple(columns), tuple(rows), notes)


def _describe(difference: FitDifference, kind: str) -> Iterator[Note]:
    """What the error bars are computed from, and the intervals."""
    bars = difference.error_bars[kind]
    text = f"±{kind}: standard errors for {KINDS[kind]}, from {bars.basis}."
    if bars.measured:
        text += f" In tests, 95 % intervals of single fits covered the truth {bars.measured}."
    yield Note(text)
    intervals = difference.intervals()[kind]
    if len(intervals) > MAX_INTERVALS:
        yield Note("FitDifference.intervals() has the intervals.", is_detail=True)
        return
    shown = ", ".join(
        f"{name} {show_interval(low, high)}"
        for name, (low, high) in intervals.items()
        if math.isfinite(high - low)
    )
    yield Note(f"95 % intervals of the differences: {shown or 'none'}", is_detail=True)
