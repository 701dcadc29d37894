"""Regularizers with a shape, such as the exponent of a power: shapes and strengths together."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from tacit.display.text import WIDTH
from tacit.equations.equations import Equations
from tacit.errors import InputError, Problem, ProblemKind, check_number, check_type
from tacit.fitting.error_bars import KINDS, ErrorBars
from tacit.fitting.fits import Fit, fit
from tacit.fitting.shape_errors import Point, shape_error_bars, square_residual, target_square
from tacit.fitting.summary import jsonable

Write = Callable[..., Equations]

MOST_SHAPES = 4
GRID = {1: 41, 2: 9, 3: 6, 4: 4}
"""Values of each shape at which the search starts, by the number of shapes."""
PROFILE = 9
"""Values of a shape in its profile, beside others."""
STARTS = (8, 4)
"""Most local minima of the grid that are followed, for one shape and for several."""
ROUGH = {"xtol": 1e-3, "ftol": 1e-3, "maxiter": 3}
EXACT = {"xtol": 1e-10, "ftol": 1e-12, "maxiter": 40}
"""Options of Powell's method."""
LOGARITHMIC = 10.0
"""Shapes whose bounds differ by this factor or more are searched on a logarithmic scale."""
AS_WELL, PLATEAU = 1.25, 1.05
"""Minima whose squared residuals are within AS_WELL of the lowest explain about as well; values
within PLATEAU of it, without a gap, are one plateau."""
APART = 0.02
"""Minima closer than this part of the range are the same."""
FLAT, WIDE = 0.25, 0.5
"""A shape is flat if a plateau is wider than FLAT of its range, or its 95 % interval than WIDE."""
SAME = 1e-3
"""Part by which squared targets may differ: rounding, where they are computed again."""
AT_BOUND = 1e-4
"""Part of the range within which an optimum counts as at the bound."""


@dataclass(frozen=True)
class ShapeFit:
    """Shapes, and the ordinary fit of the strengths there."""

    shapes: Mapping[str, float]
    fit: Fit = field(repr=False)
    """The strengths at these shapes. Its error bars and problems take the shapes as known."""
    profiles: Mapping[str, tuple[tuple[float, float], ...]] = field(repr=False)
    """For each shape, pairs of a value and the residual ratio there, ‖target − design·λ‖/‖target‖,
    with the strengths and all other shapes at their best."""
    error_bars: Mapping[str, ErrorBars] = field(repr=False, compare=False)
    """Error bars of the shapes by source of randomness: "draws", "training" or "layers"."""
    problems: tuple[Problem, ...]
    """Reasons not to believe the shapes; those of the strengths are `fit.problems`."""
    evaluations: int
    """How often equations were written."""

    @property
    def standard_errors(self) -> dict[str, dict[str, float]]:
        """Standard errors of the shapes by kind, then by name."""
        return {kind: bars.standard_errors for kind, bars in self.error_bars.items()}

    def intervals(self, level: float = 0.95) -> dict[str, dict[str, tuple[float, float]]]:
        """Two-sided intervals of the shapes by kind of error bar, then by name."""
        return {kind: bars.intervals(self.shapes, level) for kind, bars in self.error_bars.items()}

    def summary(self) -> str:
        """The shapes with their problems, and the summary of the fit, ready to print."""
        return "\n".join([*_shape_lines(self), "", self.fit.summary()])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON; infinite numbers become None."""
        plain = {
            "shapes": dict(self.shapes),
            "profiles": dict(self.profiles),
            "standard_errors": self.standard_errors,
            "intervals": self.intervals(),
            "problems": [asdict(problem) for problem in self.problems],
            "evaluations": self.evaluations,
        }
        return jsonable(plain) | {"fit": self.fit.to_dict()}

    def __str__(self) -> str:
        return self.summary()


def fit_shapes(write: Write, bounds: Mapping[str, tuple[float, float]]) -> ShapeFit:
    """Shapes s and strengths λ together: min ‖design(s)·λ − target‖² over both.

    For each s the strengths are the exact ones of `fit`, so that only shapes are searched for
    (variable projection): from a grid over the bounds, local minima are followed by Brent's
    method, or by Powell's for several shapes. It is deterministic. Shapes whose bounds differ by a
    factor of 10 or more are searched on a logarithmic scale.

    Error bars are those of a jackknife over stacked endpoints ("training") and over layers, and of
    groups of draws. Nominal 95 % intervals of 3 to 20 endpoints covered the exponent of a power
    91 to 98 % of the time. One endpoint of one layer has none.

    Traps: the error bars of `ShapeFit.fit` take the shapes as known. The residual is compared over
    the same equations only. Refused are a target that differs between shapes, and a family that
    leaves out rows at some of them (`power` at p ≤ 1, where weights are zero), unless `write`
    leaves out the same rows everywhere (zero_width=).

    Args:
        write: called with one keyword per shape; returns equations, best from a stored target.
        bounds: the lowest and highest value of each shape.

    >>> import tacit, torch
    >>> from tacit.regularizers import power
    >>> X, w = torch.eye(4).double(), torch.tensor([[0.5, 1.0, 2.0, 3.0]]).double()
    >>> model = torch.nn.Linear(4, 1, bias=False).double()
    >>> _ = model.weight.data.copy_(w)  # the optimum of mse_loss + 0.1 Σ|θ|^1.5
    >>> data = X, (w + 0.3 * w**0.5).T
    >>> target = tacit.endpoint_target(tacit.Objective(model, torch.nn.functional.mse_loss, data))
    >>> found = fit_shapes(lambda p: target.equations(power(p)), {"p": (0.5, 3.0)})
    >>> round(found.shapes["p"], 6), round(found.fit.strengths["power"], 6)
    (1.5, 0.1)
    """
    residuals = _Residuals(write, _check_bounds(write, bounds))
    names, (minima, profiles) = residuals.names, _minima_and_profiles(residuals)
    best = minima[0].point
    equations = residuals.equations(best)
    bars = {}
    if all(AT_BOUND < u < 1 - AT_BOUND for u in best):
        bars = shape_error_bars(names, residuals.equations, best, residuals.slopes(best))
    floor = equations.floor**2
    problems = [
        *_bound_problems(residuals, best),
        *_flat_problems(residuals, minima[0], profiles, bars, floor),
        *_several_problems(residuals, minima, floor),
    ]
    norm = math.sqrt(target_square(equations)) or 1.0
    return ShapeFit(
        shapes=residuals.shapes(best),
        fit=fit(equations),
        profiles={
            name: tuple((residuals.value(k, u), math.sqrt(f) / norm) for u, f in profiles[name])
            for k, name in enumerate(names)
        },
        error_bars={kind: bars[kind] for kind in KINDS if kind in bars},
        problems=tuple(problems),
        evaluations=residuals.evaluations,
    )


def _check_bounds(write: Any, bounds: Any) -> dict[str, tuple[float, float]]:
    """The bounds as pairs of floats; wrong arguments are refused."""
    needed = "a function of the shapes that returns equations"
    check_type("write", write, Callable, needed + ", as in lambda p: target.equations(power(p))")
    check_type("bounds", bounds, Mapping, "a dictionary such as {'p': (0.5, 3.0)}")
    if not 1 <= len(bounds) <= MOST_SHAPES:
        raise InputError(
            f"bounds has {len(bounds)} shapes: pass 1 to {MOST_SHAPES}. More are not determined by "
            "a search like this one: see fit_regularizer, or fix some of them."
        )
    checked = {}
    for name, pair in bounds.items():
        check_type("a name in bounds", name, str, "the name of an argument of write")
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InputError(f"the bounds of {name!r} are {pair!r}: pass two numbers, (low, high).")
        low, high = pair
        check_number(f"the lower bound of {name!r}", low)
        check_number(f"the upper bound of {name!r}", high)
        if not low < high:
            raise InputError(
                f"the bounds of {name!r} are {low!r} and {high!r}: the first has to be below the "
                "second."
            )
        checked[name] = float(low), float(high)
    return checked


class _Minimum(NamedTuple):
    """A local minimum: the squared residual, and where."""

    square: float
    point: Point


class _Residuals:
    """‖target − design·λ̂‖² as a function of shapes, each scaled to [0, 1]."""

    def __init__(self, write: Write, bounds: Mapping[str, tuple[float, float]]):
        self.write, self.bounds, self.names = write, bounds, tuple(bounds)
        self.squares: dict[Point, float] = {}
        self.evaluations = 0
        self.first: tuple[dict[str, float], tuple] | None = None
        self.target = 0.0

    def value(self, k: int, u: float) -> float:
        """The value of a shape from its place between the bounds."""
        low, high = self.bounds[self.names[k]]
        if u in (0.0, 1.0):
            return high if u else low
        if self._logarithmic(k):
            return low * (high / low) ** u
        return low + (high - low) * u

    def slopes(self, point: Point) -> list[float]:
        """The derivative of each value by its place."""
        slopes = []
        for k, u in enumerate(point):
            low, high = self.bounds[self.names[k]]
            log = self._logarithmic(k)
            slopes.append(self.value(k, u) * math.log(high / low) if log else high - low)
        return slopes

    def _logarithmic(self, k: int) -> bool:
        low, high = self.bounds[self.names[k]]
        return low > 0 and high / low >= LOGARITHMIC

    def shapes(self, point: Point) -> dict[str, float]:
        """The values of all shapes at a point."""
        return {name: self.value(k, point[k]) for k, name in enumerate(self.names)}

    def __call__(self, point: Sequence[float]) -> float:
        """The squared norm of what exact strengths leave of the target."""
        key = tuple(min(1.0, max(0.0, float(u))) for u in point)
        if key not in self.squares:
            self.squares[key] = square_residual(self.equations(key))
        return self.squares[key]

    def equations(self, point: Point) -> Equations:
        """What `write` returns there, which has to be of the same rows everywhere."""
        shapes = self.shapes(point)
        call = f"write({', '.join(f'{name}={value:.6g}' for name, value in shapes.items())})"
        try:
            equations = self.write(**shapes)
        except Exception as error:
            raise InputError(f"{call} failed: {error}") from error
        self.evaluations += 1
        needed = "what Target.equations, endpoint_equations or stack returns"
        check_type(f"the result of {call}", equations, Equations, needed)
        rows = [(b.layer, b.source, b.step, b.rows, b.left_out) for b in equations.blocks]
        form = rows, equations.targets, len(equations.names)
        if self.first is None:
            self.first = shapes, form
            if not equations.rows:
                raise InputError(f"{call} has no equations: every row was left out at a kink.")
            self.target = target_square(equations)
        if form != self.first[1]:
            raise InputError(_other_rows(call, form, *self.first))
        self._check_target(call, equations)
        return equations

    def _check_target(self, call: str, equations: Equations) -> None:
        square = target_square(equations)
        if abs(square - self.target) > SAME * max(square, self.target):
            raise InputError(
                f"{call} returned equations with another target, of norm {math.sqrt(square):.6g} "
                f"and not {math.sqrt(self.target):.6g}: their residuals cannot be compared. "
                "Compute the target once, before write, and write equations from it: "
                "target = endpoint_target(...), lambda p: target.equations(power(p))."
            )


def _other_rows(call: str, form: tuple, shapes: Mapping[str, float], first: tuple) -> str:
    """Why residuals of equations with other rows or columns cannot be compared."""
    there = ", ".join(f"{name}={value:.6g}" for name, value in shapes.items())
    counts = [
        f"{sum(row[3] for row in rows):,} equations ({sum(row[4] for row in rows):,} rows left out "
        f"at kinks) in {columns} strengths"
        for rows, _, columns in (form, first)
    ]
    return (
        f"{call} returned {counts[0]}, but {there} gave {counts[1]}: residuals can be compared "
        "only over the same equations. Leave out the same rows at every shape (zero_width=1e-9 in "
        "power, for p > 1 too), or choose bounds on one side (p below 2 for schatten)."
    )


def _minima_and_profiles(
    residuals: _Residuals,
) -> tuple[list[_Minimum], dict[str, list[tuple[float, float]]]]:
    """The local minima, the lowest first, and the profiles through the lowest."""
    minima, profiles = _search(residuals), {}
    for _ in range(3):
        best = minima[0]
        profiles = {n: _profile(residuals, best.point, k) for k, n in enumerate(residuals.names)}
        lowest = min(residuals.squares, key=residuals)
        if len(lowest) == 1 or residuals(lowest) >= best.square:
            break
        minima = sorted([_follow_many(residuals, lowest, EXACT), *minima])  # a profile led there
    return minima, profiles


def _search(residuals: _Residuals) -> list[_Minimum]:
    """Local minima, the lowest first: those of a grid, each followed."""
    count = len(residuals.names)
    places = np.linspace(0, 1, GRID[count]).tolist()
    grid = {index: residuals([places[i] for i in index]) for index in _indices(count)}

    def is_lowest(index: tuple[int, ...]) -> bool:
        steps = [(k, step) for k in range(count) for step in (-1, 1)]
        near = [(*index[:k], index[k] + step, *index[k + 1 :]) for k, step in steps]
        return all(grid[index] <= grid.get(other, math.inf) for other in near)

    starts = sorted((i for i in grid if is_lowest(i)), key=lambda i: grid[i])[: STARTS[count > 1]]
    if count == 1:
        width = 1 / (GRID[1] - 1)
        return sorted(_follow_one(residuals, places[index], width) for (index,) in starts)
    rough = sorted(_follow_many(residuals, [places[i] for i in index], ROUGH) for index in starts)
    return sorted([_follow_many(residuals, rough[0].point, EXACT), *rough[1:]])


def _indices(count: int) -> list[tuple[int, ...]]:
    return list(product(range(GRID[count]), repeat=count))


def _follow_one(residuals: _Residuals, start: float, width: float) -> _Minimum:
    """The local minimum of one shape near a point of the grid, by Brent's method."""
    from scipy.optimize import minimize_scalar

    scale, low, high = residuals([start]) or 1.0, max(0.0, start - width), min(1.0, start + width)
    minimize_scalar(
        lambda u: residuals([u]) / scale,
        bounds=(low, high),
        method="bounded",
        options={"xatol": 1e-12, "maxiter": 200},
    )
    within = [point for point in residuals.squares if low <= point[0] <= high]
    return min(_Minimum(residuals.squares[point], point) for point in within)


def _follow_many(
    residuals: _Residuals, start: Sequence[float], options: Mapping[str, float], *, fixed: int = -1
) -> _Minimum:
    """The local minimum of several shapes near a point, by Powell's method; one may be fixed."""
    from scipy.optimize import minimize

    scale = residuals(start) or 1.0
    free = [k for k in range(len(start)) if k != fixed]

    def point_of(x: np.ndarray) -> Point:
        point = list(start)
        for k, u in zip(free, np.clip(np.atleast_1d(x), 0, 1), strict=True):
            point[k] = float(u)
        return tuple(point)

    solution = minimize(
        lambda x: residuals(point_of(x)) / scale,
        [start[k] for k in free],
        method="Powell",
        bounds=[(0.0, 1.0)] * len(free),
        options=dict(options),
    )
    point = min((tuple(start), point_of(solution.x)), key=residuals)
    return _Minimum(residuals(point), point)


def _profile(residuals: _Residuals, best: Point, k: int) -> list[tuple[float, float]]:
    """Place and smallest squared residual along one shape, with all others at their best."""
    if len(best) == 1:
        grid = np.linspace(0, 1, GRID[1]).tolist()
        return sorted((u, residuals([u])) for u in {*grid, best[0]})
    profile = [(best[k], residuals(best))]
    grid = np.linspace(0, 1, PROFILE).tolist()
    above, below = [u for u in grid if u > best[k]], [u for u in grid if u < best[k]]
    for side in (above, below[::-1]):
        point = best
        for u in side:
            start = (*point[:k], u, *point[k + 1 :])
            square, point = _follow_many(residuals, start, ROUGH, fixed=k)
            profile.append((u, square))
    return sorted(profile)


def _bound_problems(residuals: _Residuals, best: Point) -> Iterator[Problem]:
    """Shapes whose best value is at a bound."""
    for k, name in enumerate(residuals.names):
        if not AT_BOUND < best[k] < 1 - AT_BOUND:
            yield Problem(
                ProblemKind.UNIDENTIFIED,
                f"The best {name} is at its bound ({residuals.value(k, best[k]):.6g}): a value "
                "outside may explain more.",
                "Widen the bounds; if the best value stays at them, this family does not fit.",
                (name,),
            )


def _flat_problems(
    residuals: _Residuals,
    best: _Minimum,
    profiles: Mapping[str, list[tuple[float, float]]],
    bars: Mapping[str, ErrorBars],
    floor: float,
) -> Iterator[Problem]:
    """Shapes of which very different values explain about as well.

    That is so if an error bar is wide. Without error bars, if the residual hardly rises.
    """
    slopes = residuals.slopes(best.point)
    measured = [b for kind, b in bars.items() if kind != "layers"]
    for k, name in enumerate(residuals.names):
        errors = [b.standard_errors[name] * b.quantile(0.95) for b in measured]
        if errors:
            half = min(0.5, max(errors) / slopes[k]) if math.isfinite(max(errors)) else 0.5
            low, high = max(0.0, best.point[k] - half), min(1.0, best.point[k] + half)
            most = WIDE
        else:
            most = FLAT
            limit = PLATEAU * max(best.square, floor)
            low, high = _plateau(profiles[name], best.point[k], limit)
        if high - low > most:
            a, b = (f"{residuals.value(k, u):.4g}" for u in (low, high))
            yield Problem(
                ProblemKind.UNIDENTIFIED,
                f"The profile of {name} is flat: values from {a} to {b} explain about as well.",
                "Do not interpret it. Stack endpoints whose weights have other sizes, or fix it.",
                (name,),
            )


def _plateau(profile: list[tuple[float, float]], best: float, limit: float) -> tuple[float, float]:
    """The places around the best, without a gap, whose squared residual is within the limit."""
    low = high = best
    for place, square in sorted(profile):
        if place > best:
            if square > limit:
                break
            high = place
    for place, square in sorted(profile, reverse=True):
        if place < best:
            if square > limit:
                break
            low = place
    return low, high


def _several_problems(
    residuals: _Residuals, minima: Sequence[_Minimum], floor: float
) -> Iterator[Problem]:
    """Other minima that explain about as well as the best."""
    best, limit = minima[0], AS_WELL * max(minima[0].square, floor)
    shown: list[Point] = [best.point]
    for other in minima[1:]:
        apart = all(np.abs(np.subtract(other.point, point)).max() > APART for point in shown)
        if other.square > limit or not apart or not _divided(residuals, best, other):
            continue
        shown.append(other.point)
        a, b = (
            ", ".join(f"{name} = {value:.4g}" for name, value in residuals.shapes(m.point).items())
            for m in (best, other)
        )
        yield Problem(
            ProblemKind.UNIDENTIFIED,
            f"There are several minima: {b} leaves {math.sqrt(other.square):.3g} unexplained, and "
            f"{a} leaves {math.sqrt(best.square):.3g}.",
            "Do not interpret the best one by itself. Stack endpoints, or narrow the bounds to "
            "what is known otherwise.",
            residuals.names,
        )


def _divided(residuals: _Residuals, best: _Minimum, other: _Minimum) -> bool:
    """Whether the residual rises between two minima, so that they are not one plateau."""
    between = [
        [a + t * (b - a) for a, b in zip(best.point, other.point, strict=True)]
        for t in (0.25, 0.5, 0.75)
    ]
    return max(map(residuals, between)) > PLATEAU * max(best.square, other.square)


def _shape_lines(shape_fit: ShapeFit) -> list[str]:
    """The shapes, their error bars and problems as text."""
    lines = [f"tacit: shapes, from {shape_fit.evaluations} sets of equations"]
    intervals = shape_fit.intervals()
    for name, value in shape_fit.shapes.items():
        low, high = shape_fit.profiles[name][0], shape_fit.profiles[name][-1]
        lines.append(f"{name} = {value:.6g}")
        lines += [
            f"  ±{kind} {bars.standard_errors[name]:.3g}, 95 % interval [{a:.6g}, {b:.6g}] from "
            f"{bars.basis}"
            for kind, bars in shape_fit.error_bars.items()
            for a, b in [intervals[kind][name]]
        ]
        lines.append(
            f"  residual ratio {shape_fit.fit.residual_ratio:.3g}; {low[1]:.3g} at {low[0]:g}, "
            f"{high[1]:.3g} at {high[0]:g}"
        )
    if not shape_fit.error_bars:
        lines.append("± none: neither endpoints, layers nor draws show how certain the shapes are.")
    for number, problem in enumerate(shape_fit.problems, 1):
        text = f"[{number}] {problem}"
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="    ")
    return lines if shape_fit.problems else [*lines, "No problems of the shapes found."]
