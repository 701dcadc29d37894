"""The shape of a fitted penalty Σ s(x_i): s and s′ on a grid, with the bands of its error bars."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tacit.display import figures
from tacit.equations.sources import Family
from tacit.errors import InputError
from tacit.fitting.error_bars import KINDS, ErrorBars, error_bars_from
from tacit.fitting.solving import System
from tacit.fitting.summary import jsonable
from tacit.objective.params import shorten
from tacit.regularizers.family import Shape
from tacit.regularizers.splines import Hats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tacit.fitting.fits import Fit

POINTS = 201
"""Points of a grid, besides the knots."""
Band = tuple[tuple[float, float], ...]
"""A 95 % interval for every point of the grid."""


@dataclass(frozen=True)
class Curve:
    """s and s′ of a penalty Σ s(x_i) on a grid, as plain numbers.

    Intervals are pointwise, at 95 %, by kind of error bar. A number that the equations do not
    determine is NaN: s beyond an interval between knots without weights, for example.
    """

    name: str
    of: str
    """What x are: weights, or singular values."""
    grid: tuple[float, ...]
    s: tuple[float, ...]
    """s at the grid's points, with s(0) = 0."""
    derivative: tuple[float, ...]
    """s′ at the grid's points."""
    knots: tuple[float, ...] = ()
    """Where s′ changes its slope; of |x| for an even shape. Empty for families of fixed shape."""
    counts: tuple[int, ...] = ()
    """How many x lie below the first knot, between each two, and above the last, at all points that
    the equations are of (the last step of a trajectory): where there is evidence. Empty where the
    equations are of a part of the weights: one layer, or rows=."""
    even: bool = False
    s_intervals: dict[str, Band] = field(default_factory=dict)
    derivative_intervals: dict[str, Band] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON; numbers that are not finite become None."""
        return jsonable(asdict(self))

    def plot(self, kind: str | None = None) -> "Figure":
        """Draw s and s′ with their bands, above where the weights are, as a matplotlib Figure.

        It is as wide as a page of two columns.

        Args:
            kind: the error bars of the bands; by default those that come first in `KINDS`, without
                `layers`, whose disagreement is not a precision. "" for no bands.
        """
        kinds = [k for k in KINDS if k in self.derivative_intervals]
        chosen = next((k for k in kinds if k != "layers"), "") if kind is None else kind
        if chosen and chosen not in kinds:
            raise InputError(f"kind is {kind!r}: this curve has {', '.join(kinds) or 'no bands'}.")
        with figures.style():
            return self._draw(chosen)

    def _draw(self, chosen: str) -> "Figure":
        figure = figures.new_figure(figures.PAGE, 3.0)
        heights = (4, 1) if self.counts else (1,)
        panels: Any = figure.subplots(
            len(heights), 2, sharex=True, squeeze=False, height_ratios=heights
        )
        drawn = (self.s, self.s_intervals), (self.derivative, self.derivative_intervals)
        for column, (label, (values, bands)) in enumerate(zip(("s", "s′"), drawn, strict=True)):
            self._draw_values(panels[0, column], values, bands.get(chosen))
            panels[0, column].set_ylabel(label)
            if self.counts:
                self._draw_counts(panels[1, column])
            where = "weight" if self.of == "weights" else "singular value"
            panels[-1, column].set_xlabel(where)
        title = f"{self.name}{f', 95 % for {KINDS[chosen]}' if chosen else ''}"
        figures.set_title(figure, [title])
        return figure

    def _draw_values(self, axes: Any, values: Sequence[float], band: Band | None) -> None:
        """A line over the grid, with its band."""
        axes.axhline(0, color="black", lw=0.6)
        for part in self._sides():
            x, y = ([numbers[i] for i in part] for numbers in (self.grid, values))
            if band is not None:
                low, high = zip(*(band[i] for i in part), strict=True)
                axes.fill_between(x, low, high, color=figures.BLUE, alpha=0.25, lw=0)
            axes.plot(x, y, color=figures.BLUE, lw=1.6)

    def _sides(self) -> list[list[int]]:
        """The points of the grid, cut at zero for an even shape, which may jump there."""
        negative = [i for i, x in enumerate(self.grid) if self.even and x < 0]
        others = [i for i in range(len(self.grid)) if i not in set(negative)]
        return [part for part in (negative, others) if part]

    def _draw_counts(self, axes: Any) -> None:
        """Bars between knots, as high as the weights there are dense."""
        if len(self.knots) == 1:
            axes.axvline(self.knots[0], color=figures.GREY)
            axes.set_yticks([])
            return
        inside, lengths = self.counts[1:-1], torch.tensor(self.knots).diff().tolist()
        thinnest = (self.knots[-1] - self.knots[0]) / POINTS
        pairs = zip(inside, lengths, strict=True)
        heights = [count / max(length, thinnest) for count, length in pairs]
        mirrored = self.even and self.of == "weights"
        for sign, part in ((1, 0.5), (-1, 0.5)) if mirrored else ((1, 1.0),):
            left = [sign * knot for knot in self.knots[:-1]]
            widths = [sign * length for length in lengths]
            tops = [part * height for height in heights]
            axes.bar(left, tops, widths, align="edge", color=figures.GREY, alpha=0.6, lw=0)
        positive = [height for height in heights if height > 0]
        if positive:
            axes.set_yscale("log")
            axes.set_ylim(0.2 * min(positive), 2 * max(positive))
        axes.set_yticks([])
        axes.minorticks_off()
        axes.set_ylabel("density\n(log)", size=figures.SMALL)


class _Combinations(NamedTuple):
    """What each strength adds to s and to s′ at the points of a grid: (points, strengths)."""

    s: Tensor
    derivative: Tensor


def curve_of(fit: "Fit", name: str, grid: Sequence[float] | None) -> Curve:
    """The curve of one family of a fit."""
    family, columns = _find_family(fit, name)
    up_to_constant = False
    if family.shape is not None:
        points = _check_grid(grid) if grid is not None else _default_grid(family.shape)
        combinations = _of_shape(family.shape, points)
        if up_to_constant := _known_up_to_a_constant(fit, family.shape):
            combinations = _from_zero(combinations, family.shape, points)
        shape = replace(family.shape, counts=_total_counts(fit, family.name))
    else:
        points, combinations = _of_fixed_family(fit, family, grid)
        shape = Shape(knots=())
    full = [torch.zeros(len(points), len(fit.strengths), dtype=torch.float64) for _ in range(2)]
    for whole, part in zip(full, combinations, strict=True):
        whole[:, columns] = part
    values = [_values(fit, whole) for whole in full]
    by_kind = _error_bars_up_to_constant(fit, columns, shape) if up_to_constant else fit.error_bars
    bands = [
        {kind: _band(value, whole, bars) for kind, bars in by_kind.items()}
        for value, whole in zip(values, full, strict=True)
    ]
    return Curve(
        name=family.name,
        of=shape.of,
        grid=tuple(points.tolist()),
        s=tuple(values[0].tolist()),
        derivative=tuple(values[1].tolist()),
        knots=shape.knots,
        counts=shape.counts,
        even=shape.even,
        s_intervals=bands[0],
        derivative_intervals=bands[1],
    )


def _find_family(fit: "Fit", name: str) -> tuple[Family, list[int]]:
    """The family of this name, or the only one with knots, and its columns."""
    families, start = [], 0
    for family in fit.equations.families:
        families.append((family, list(range(start, start + family.size))))
        start += family.size
    named = [(f, c) for f, c in families if (f.name == name if name else f.shape is not None)]
    if len(named) != 1:
        names = [family.name for family, _ in families]
        raise InputError(
            f"curve was asked for {name!r}: pass the name of one of {shorten(names)}. Without a "
            "name it needs exactly one spline; equations of a layer do not have all of its knots, "
            "and fit.unconstrained has no shape."
        )
    return named[0]


def _check_grid(grid: Any) -> Tensor:
    try:
        points = torch.as_tensor(grid, dtype=torch.float64).flatten()
    except (TypeError, ValueError, RuntimeError):
        points = torch.zeros(0)
    if not len(points) or not points.isfinite().all():
        raise InputError(f"grid is {str(grid)[:80]}: pass a sequence of finite numbers.")
    return points


def _default_grid(shape: Shape) -> Tensor:
    """The knots, and points at equal distances between them; of both signs for even weights."""
    knots = torch.tensor(shape.knots, dtype=torch.float64)
    between = torch.linspace(shape.knots[0], shape.knots[-1], POINTS, dtype=torch.float64)
    points = torch.cat([knots, between]).unique()
    if shape.even:  # at zero s′ may jump
        points = points[points > 0]
    both = shape.even and shape.of == "weights"
    return torch.cat([-points.flip(0), points]) if both else points


def _of_shape(shape: Shape, points: Tensor) -> _Combinations:
    hats = Hats(shape)
    return _Combinations(hats.integrals(points), hats.derivatives(points))


def _known_up_to_a_constant(fit: "Fit", shape: Shape) -> bool:
    """Whether all equations are of paths, which have only differences of s′."""
    return all(source.mode == "accumulated" for source in fit.sources) and not shape.even


def _from_zero(combinations: _Combinations, shape: Shape, points: Tensor) -> _Combinations:
    """s′ − s′(0): of a path from one start, s′ is known up to a constant."""
    start = Hats(shape).derivatives(points.new_zeros(1))
    s, derivative = combinations.s - points[:, None] * start, combinations.derivative - start
    # What rounding leaves would be a part of the unknown constant.
    largest = max(abs(knot) for knot in shape.knots)
    s = torch.where(s.abs() <= 1e-12 * largest, 0.0, s)
    return _Combinations(s, torch.where(derivative.abs() <= 1e-12, 0.0, derivative))


def _error_bars_up_to_constant(
    fit: "Fit", columns: list[int], shape: Shape
) -> dict[str, ErrorBars]:
    """Error bars of s′ − s′(first knot), for which the strength there counts as known.

    Of a convex shape, that strength alone has the constant, and its column is zero.
    """
    others = [column for column in range(len(fit.strengths)) if column != columns[0]]
    if not others:
        return {}
    strengths = torch.tensor(list(fit.strengths.values()), dtype=torch.float64)
    if not shape.convex:
        strengths[columns] -= strengths[columns[0]].clone()
    by_kind = error_bars_from(fit.equations.select_columns(others), strengths[others])
    names, places = tuple(fit.strengths), torch.tensor(others)
    return {kind: bars.widened(names, places) for kind, bars in by_kind.items()}


def _of_fixed_family(
    fit: "Fit", family: Family, grid: Sequence[float] | None
) -> tuple[Tensor, _Combinations]:
    """The function of one entry, of a family that is a sum of one function over all entries."""
    origin = fit.equations.origin
    candidates = () if origin is None else origin.candidates.estimated
    regularizer = next((r for r in candidates if r.name == family.name), None)
    if regularizer is None or regularizer.entrywise is None or family.size != 1:
        raise InputError(
            f"{family.name!r} has no curve: it is not a function of single weights with one "
            "strength, or its equations are from a file, a stack or a layer, which do not have it. "
            "A spline has its curve there, too."
        )
    if grid is not None:
        points = _check_grid(grid)
    elif origin is not None and origin.point is not None:
        params = origin.point.params
        weights = [params[n].detach() for n in regularizer.bind(params).active if params[n].numel()]
        ends = min(float(w.min()) for w in weights), max(float(w.max()) for w in weights)
        points = torch.linspace(*ends, POINTS, dtype=torch.float64)
    else:
        raise InputError("the equations are of several points: pass grid=, the points of a curve.")
    function = regularizer.entrywise
    return points, _Combinations(
        function.value(points)[:, None], function.derivative(points)[:, None]
    )


def _total_counts(fit: "Fit", name: str) -> tuple[int, ...]:
    """Counts of all sources; () where one of them has none."""
    if not all(name in source.counts for source in fit.sources):
        return ()
    counts = [source.counts[name] for source in fit.sources]
    return tuple(sum(places) for places in zip(*counts, strict=True))


def _values(fit: "Fit", combinations: Tensor) -> Tensor:
    """The combinations of the strengths; NaN where the equations do not determine them."""
    strengths = torch.tensor(list(fit.strengths.values()), dtype=torch.float64)
    system = System(fit.equations.factor()[:, : len(strengths)])
    return torch.where(system.determines(combinations), combinations @ strengths, math.nan)


def _band(values: Tensor, combinations: Tensor, bars: ErrorBars) -> Band:
    """Intervals of combinations of strengths.

    Strengths that λ ≥ 0 holds at zero (a NaN variance) count as known.
    """
    variances = bars.covariance.diagonal()
    unknown = torch.isinf(variances)
    covariance = torch.where(bars.covariance.isfinite(), bars.covariance, 0.0)
    covariance[unknown], covariance[:, unknown] = 0, 0
    squares = ((combinations @ covariance) * combinations).sum(1).clamp_min(0)
    squares[(combinations[:, unknown] != 0).any(1)] = math.inf
    half_widths = bars.quantile() * squares.sqrt()
    return _pairs((values - half_widths).tolist(), (values + half_widths).tolist())


def _pairs(low: Iterable[float], high: Iterable[float]) -> Band:
    return tuple(zip(low, high, strict=True))
