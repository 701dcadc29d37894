"""Penalties whose shape is estimated: R = Σ s(θ_i), or Σ s(σ_k) of singular values, s′ a spline.

s′ is linear between knots, so that it is linear in its values at the knots: the strengths.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.errors import InputError, check_number, check_type
from tacit.objective.params import (
    Params,
    Scope,
    entries,
    entries_of,
    largest_entry,
    select,
    to_float64,
)
from tacit.objective.ranks import current_ranks
from tacit.regularizers.family import ZERO_WIDTH, Columns, Regularizer, Shape, Subspace
from tacit.regularizers.matrices import decompose, is_matrix, row_and_column_space

MOST_KNOTS = 1_000
"""The largest number of knots: the equations have as many columns."""
SPREAD = 0.2
"""Part of the knots that are spread evenly over the range, instead of as the weights are."""
MOST_SORTED = 2**22
"""Knots are quantiles of at most about so many weights, taken at equal distances."""


def spline(
    knots: int | Sequence[float] = 24,
    *,
    even: bool = False,
    convex: bool = False,
    scope: Scope = None,
    name: str = "spline",
    zero_width: float = ZERO_WIDTH,
) -> Regularizer:
    """A penalty of any shape, R(θ) = Σ_i s(θ_i), with s′ linear between knots and s(0) = 0.

    s′(x) = Σ_j λ_j B_j(x), where the hat function B_j is 1 at knot j, 0 at all others, and linear
    between them. So the strength λ_j is s′ at knot j, as in `spline[0.25]`, and one exact
    least-squares solve finds the whole curve: `Fit.curve("spline")`.

    even=True has s′(x) = sign(x) h(|x|), with h on knots of |θ|, from the smallest on: s may have a
    kink at zero, as |x| has, and rows at zero are left out as in `l1`.

    convex=True has an s′ that does not fall. Its strengths are then s′ at the first knot, as in
    `spline[-0.3]`, and how much s′ rises up to each further knot, as in `spline[rise to 0.2]`.
    Every fit keeps the rises at zero or above; for even=True also s′ at the first knot, which then
    lies at zero.

    A number of knots stands for so many quantiles of the weights in scope that are not zero, or for
    all different weights where these are fewer. They are set at the first weights that the
    regularizer is used with, those of a whole trajectory if it is one, and then stay: the same
    object has the same knots at all steps, endpoints and members, and when a network is retrained.
    Beyond the outermost knots s′ (or h) goes on linearly.

    Trap: an object that was used for one network has that network's knots. Make a new one for
    another network, or pass knots that cover the weights of both. With knots as many as weights
    every target is explained, as for `diagonal`; the fit reports that it may be by chance.

    >>> params = {"w": torch.tensor([-1.0, 0.5, 1.0])}
    >>> spline([-1, 0, 1]).gradient(params)["spline[1]"]
    {'w': tensor([0.0000, 0.5000, 1.0000], dtype=torch.float64)}

    Args:
        knots: how many knots, or the knots, in increasing order; of |θ| for an even spline.
        even: whether s(−x) = s(x).
        convex: whether s must be convex.
        scope: which parameters the sum runs over.
        name: the name that strengths are listed under.
        zero_width: weights up to this part of the largest in scope count as zero, in an even
            spline; by default the width of `l1`.
    """
    for flag, given in (("even", even), ("convex", convex)):
        check_type(flag, given, bool, "True or False")
    shape = Shape(check_knots(knots, even), even, convex)

    def in_scope(params: Params) -> Params:
        return {n: params[n] for n in select(params, scope, what=f"scope of {name}")}

    def largest(tensors: Params) -> float:
        return largest_entry(tensors)

    def sizes(tensor: Tensor, zero: float) -> Tensor:
        size = tensor.flatten().abs()
        return size[size > zero] if even else tensor.flatten()

    weights = _Arguments(
        in_scope, largest, sizes, points=lambda t: to_float64(t.flatten()), bind=_bind_weights
    )
    return _make_spline("spline", name, _FixedKnots(name, knots, shape), weights, zero_width)


def spectral_spline(
    knots: int | Sequence[float] = 24,
    *,
    convex: bool = False,
    scope: Scope = None,
    name: str = "spectral_spline",
    zero_width: float = ZERO_WIDTH,
) -> Regularizer:
    """A penalty of any shape of singular values, R(θ) = Σ_W Σ_k s(σ_k(W)), gradient U s′(S) Vᵀ.

    W = U S Vᵀ are all matrices; tensors of more than two dimensions are reshaped by their first,
    and vectors are not covered. s′ is linear between knots, and the strength at a knot is s′ there,
    as in `spline`; `nuclear_norm` has s′ = 1, and `l2` of the matrices s′(σ) = 2σ. Knots are
    quantiles of the singular values of all matrices in scope, or those that are passed.

    s′ may be above zero at σ = 0. So at deficient rank the equations of all columns and of the
    target are along the row and column space, as for `nuclear_norm`.

    Trap: a matrix has few singular values, so that a small network has hardly more of them than
    knots: pass fewer knots, or stack endpoints with the same object.

    Args:
        knots: how many knots, or the knots, in increasing order.
        convex: whether s must be convex and not fall; see `spline`.
        scope: which parameters the sum runs over.
        name: the name that strengths are listed under.
        zero_width: singular values up to this part of the largest norm in scope count as zero.
    """
    check_type("convex", convex, bool, "True or False")
    shape = Shape(check_knots(knots, even=True), even=True, convex=convex, of="singular values")

    def in_scope(params: Params) -> Params:
        names = select(params, scope, what=f"scope of {name}")
        tensors = {n: params[n] for n in names if is_matrix(params[n])}
        if not tensors:
            raise InputError(
                f"{name} is of matrices, and its scope has none: widen it, or leave {name} out."
            )
        return tensors

    def largest(tensors: Params) -> float:
        return max(float(t.norm()) for t in tensors.values())

    def sizes(tensor: Tensor, zero: float) -> Tensor:
        _, s, _, rounding = decompose(tensor)
        return s[s > max(zero, rounding)]

    def points(tensor: Tensor) -> Tensor:
        return torch.linalg.svdvals(to_float64(tensor.flatten(1)))

    matrices = _Arguments(in_scope, largest, sizes, points, bind=_bind_matrices)
    fixed = _FixedKnots(name, knots, shape)
    return _make_spline("spectral_spline", name, fixed, matrices, zero_width)


class _Arguments(NamedTuple):
    """What s is a function of: weights, or singular values."""

    in_scope: Callable[[Params], Params]
    """The tensors that have any."""
    largest: Callable[[Params], float]
    """What a zero width is a part of."""
    sizes: Callable[[Tensor, float], Tensor]
    """sizes(tensor, zero) are those of a tensor, above zero if the shape is even."""
    points: Callable[[Tensor], Tensor]
    """All of a tensor in float64, which autograd can differentiate."""
    bind: Callable[["Hats", str, Params, float], Columns]
    """bind(hats, name, tensors, zero) returns the columns."""


def _make_spline(
    family: str, name: str, fixed: "_FixedKnots", arguments: _Arguments, zero_width: float
) -> Regularizer:
    """The regularizer Σ s(x) of these arguments x."""
    check_number("zero_width", zero_width, least=0, below=1)

    def sizes_of(params: Params, width: float) -> list[Tensor]:
        tensors = {n: t.detach() for n, t in arguments.in_scope(params).items()}
        zero = width * arguments.largest(tensors)
        return [arguments.sizes(tensor, zero) for tensor in tensors.values()]

    def make(width: float) -> Regularizer:
        def bind(params: Params) -> Columns:
            hats = fixed.at(lambda: sizes_of(params, zero_width))
            tensors = {n: t.detach() for n, t in arguments.in_scope(params).items()}
            columns = arguments.bind(hats, name, tensors, width * arguments.largest(tensors))
            counts = hats.counts(sizes_of(params, width))
            return replace(columns, shape=replace(hats.shape, counts=counts))

        def value(params: Params) -> Tensor:
            hats = fixed.at(lambda: sizes_of(params, zero_width))
            tensors = list(arguments.in_scope(params).values())
            values = [hats.values(arguments.points(tensor)) for tensor in tensors]
            return torch.stack([v.to(values[0].device) for v in values]).sum(0).to(tensors[0])

        even, convex = fixed.shape.even, fixed.shape.convex
        flags = {"even": even and family == "spline", "convex": convex}
        definition = f"{family}({', '.join(flag for flag, given in flags.items() if given)})"
        reads = "rows" if family == "spline" else "model"
        regularizer = Regularizer(
            name, bind, value, kind="spline", definition=definition, reads=reads
        )
        return replace(regularizer, with_zero_width=make if even else None, place_knots=place_knots)

    def place_knots(points: Sequence[Params]) -> None:
        fixed.at(lambda: [s for params in points for s in sizes_of(params, zero_width)])

    return make(zero_width)


def _bind_weights(hats: "Hats", name: str, tensors: Params, zero: float) -> Columns:
    """The columns of a function of weights, B_j(θ_i)."""

    def rows(tensor_name: str, part: slice) -> Tensor:
        return hats.derivatives(to_float64(entries_of(tensors[tensor_name], part)))

    def kinks(tensor_name: str, part: slice) -> Tensor | None:
        if not hats.shape.even:
            return None
        return entries_of(tensors[tensor_name], part).abs() <= zero

    return Columns(hats.names(name), hats.active_on(tensors), rows, kinks)


def _bind_matrices(hats: "Hats", name: str, tensors: Params, zero: float) -> Columns:
    """The columns of a function of singular values, U B_j(S) Vᵀ."""

    @lru_cache(maxsize=1)
    def gradient_of(tensor_name: str) -> tuple[Callable[[slice], Tensor], Subspace | None]:
        u, s, vh, rounding = decompose(tensors[tensor_name])
        rank = int((s > max(rounding, zero)).sum())
        left, weights, right = u[:, :rank], hats.derivatives(s[:rank]), vh[:rank]
        width = vh.shape[1]

        def at(part: slice) -> Tensor:
            first, last = part.start // width, math.ceil(part.stop / width)
            above = left[first:last, :, None] * weights  # (rows, rank, columns)
            block = torch.einsum("arj,rb->abj", above, right).flatten(0, 1)
            return block[part.start - first * width : part.stop - first * width]

        return at, None if rank == len(s) else row_and_column_space(left, right)

    return Columns(
        hats.names(name),
        hats.active_on(tensors),
        rows=lambda tensor_name, part: gradient_of(tensor_name)[0](part),
        subspace=lambda tensor_name: gradient_of(tensor_name)[1],
    )


def check_knots(knots: Any, even: bool) -> tuple[float, ...]:
    """The knots that were passed, checked; () for a number of knots."""
    if type(knots) is int:
        if not 1 <= knots <= MOST_KNOTS:
            raise InputError(f"knots is {knots}: pass a number from 1 to {MOST_KNOTS:,}.")
        return ()
    try:
        listed = knots.tolist() if isinstance(knots, Tensor) else list(knots)
    except TypeError:
        listed = []
    numbers = isinstance(listed, list) and all(map(_is_number, listed))
    if not listed or not numbers or len(listed) > MOST_KNOTS:
        raise InputError(
            f"knots is {str(knots)[:80]}: pass a number of them, such as 24, or the knots "
            f"themselves, 1 to {MOST_KNOTS:,} numbers in increasing order."
        )
    points = tuple(float(k) for k in listed)
    rising = all(a < b for a, b in pairwise(points))
    if not rising or not all(map(math.isfinite, points)) or (even and points[0] < 0):
        least = ", of |θ| and so not below zero" if even else ""
        raise InputError(
            f"knots are {str(listed)[:80]}: finite numbers in increasing order{least} are needed."
        )
    return points


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class _FixedKnots:
    """The knots of one spline: those that were passed, or quantiles of the first weights it meets.

    They are set once, so that values and gradients at other weights are of the same penalties.
    """

    def __init__(self, name: str, knots: Any, shape: Shape) -> None:
        self._name, self._count, self.shape = name, knots, shape
        self._hats = Hats(_from_zero(shape)) if shape.knots else None

    def at(self, sizes: Callable[[], list[Tensor]]) -> "Hats":
        """The hat functions; sizes() are the weights (above zero) that they are quantiles of."""
        if self._hats is None:
            knots = _quantiles(sizes(), self._count)
            if not knots:
                raise InputError(
                    f"{self._name} places its knots at quantiles of the {self.shape.of} in its "
                    "scope that are not zero, and there are none: widen its scope, or pass knots."
                )
            self._hats = Hats(_from_zero(replace(self.shape, knots=knots)))
        return self._hats


def _from_zero(shape: Shape) -> Shape:
    """The same functions, with the first knot at zero if the shape is even and convex.

    Such a shape is one whose h does not fall and has h(0) ≥ 0: a bound on a strength at zero.
    """
    first = shape.even and shape.convex and len(shape.knots) > 1
    return replace(shape, knots=(0.0, *shape.knots[1:])) if first else shape


def _quantiles(parts: list[Tensor], count: int) -> tuple[float, ...]:
    """All different values if they are at most so many; else about so many quantiles.

    Zeros are in no quantile: there may be many of them. The quantiles are of the values, and in a
    smaller part of the range between them, so that intervals do not get wide where values are
    sparse. The outermost are the smallest and the largest value; the others lie halfway between a
    value and the next, where no weight has the kink of s′.
    """
    parts = [to_float64(part) for part in parts if part.numel()]
    stride = max(
        1, math.ceil(entries({str(i): part for i, part in enumerate(parts)}) / MOST_SORTED)
    )
    ends = [torch.stack([part.min(), part.max()]) for part in parts] if stride > 1 else []
    here = [part.cpu() for part in [*ends, *(part[::stride] for part in parts)]]
    values, _ = current_ranks().whole(torch.cat([torch.zeros(0, dtype=torch.float64), *here]))
    if not len(values):
        return ()
    if len(different := values.unique()) <= count:
        return tuple(different.tolist())
    values, different = values[values != 0].sort().values, different[different != 0]
    if count == 1:
        return (float(values[len(values) // 2]),)
    ranks, levels = (torch.linspace(0, 1, n, dtype=torch.float64) for n in (len(values), count))
    spread = (values - values[0]) / (values[-1] - values[0])
    places = torch.searchsorted((1 - SPREAD) * ranks + SPREAD * spread, levels)
    places = places.clamp_max(len(values) - 1)
    next_one = torch.searchsorted(different, values[places[1:-1]], right=True)
    between = (different[next_one - 1] + different[next_one.clamp_max(len(different) - 1)]) / 2
    knots = torch.cat([values[:1], between, values[-1:]])
    return tuple(knots.unique().tolist())


class Hats:
    """The hat functions B_j of a shape's knots, and what strengths multiply: B_j, or their sums.

    Between knots m and m+1, with t = (x − k_m)/(k_{m+1} − k_m), B_m = 1 − t and B_{m+1} = t.
    Outside, t of the outermost interval is below 0 or above 1: s′ goes on linearly. An even shape
    is a function of |x|.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def names(self, name: str) -> tuple[str, ...]:
        """The names of the strengths, with as many digits as tell the knots apart."""
        digits, count = 4, len(self.shape.knots)
        while len({f"{knot:.{digits}g}" for knot in self.shape.knots}) < count:
            digits += 1
        numbers = [f"{knot:.{digits}g}" for knot in self.shape.knots]
        rise = "rise to " if self.shape.convex else ""
        return tuple(f"{name}[{rise if j else ''}{number}]" for j, number in enumerate(numbers))

    def active_on(self, tensors: Params) -> dict[str, tuple[int, ...]]:
        """All columns, on every tensor."""
        return dict.fromkeys(tensors, tuple(range(len(self.shape.knots))))

    def derivatives(self, x: Tensor) -> Tensor:
        """What each strength adds to s′ at points x in float64: (points, strengths)."""
        size = x.abs() if self.shape.even else x
        hats = x.new_zeros(len(x), len(self.shape.knots))
        if len(self.shape.knots) == 1:
            hats[:] = 1
        else:
            interval, t = self._intervals(size)
            hats.scatter_(1, interval[:, None], (1 - t)[:, None])
            hats.scatter_(1, interval[:, None] + 1, t[:, None])
        if self.shape.even:
            hats = hats * x.sign()[:, None]
        return self._summed(hats)

    def integrals(self, x: Tensor) -> Tensor:
        """What each strength adds to s at points x in float64: (points, strengths)."""
        size = x.abs() if self.shape.even else x
        if len(self.shape.knots) == 1:
            return size[:, None]
        ends = torch.cat([size, x.new_zeros(1)])
        interval, t = self._intervals(ends)
        lengths = self._knots_on(x).diff()
        whole = torch.nn.functional.pad(torch.diag(lengths / 2), (0, 1))
        whole = whole + whole.roll(1, 1)  # what each whole interval adds
        below = (whole.cumsum(0) - whole)[interval]
        length = lengths[interval][:, None]
        left, right = (t - t.square() / 2)[:, None], (t.square() / 2)[:, None]
        below.scatter_add_(1, interval[:, None], length * left)
        below.scatter_add_(1, interval[:, None] + 1, length * right)
        return self._summed(below[:-1] - below[-1])

    def values(self, x: Tensor) -> Tensor:
        """What each strength adds to Σ_i s(x_i), in float64; autograd can differentiate it.

        In an interval of length d the integral of B_m from its left end is d(t − t²/2), and that of
        B_{m+1} is d t²/2; whole intervals add d/2 to both. So counts and sums of t and t² in every
        interval are all that is needed of the points.
        """
        size = x.abs() if self.shape.even else x
        if len(self.shape.knots) == 1:
            return size.sum()[None]
        total = self._integral_from_first_knot(size)
        at_zero = self._integral_from_first_knot(x.new_zeros(1))
        return self._summed(total - len(x) * at_zero)

    def counts(self, sizes: list[Tensor]) -> tuple[int, ...]:
        """How many points lie below the first knot, between each two, and above the last.

        A point at a knot counts in the interval that begins there; at the last knot, in the last.
        """
        knots = torch.tensor(self.shape.knots, dtype=torch.float64)
        counts = torch.zeros(len(knots) + 1, dtype=torch.int64)
        for part in sizes:
            points = to_float64(part).contiguous()
            places = torch.searchsorted(knots.to(points.device), points, right=True)
            places[points == self.shape.knots[-1]] = len(knots) - 1
            counts += places.bincount(minlength=len(knots) + 1).cpu()
        return tuple(current_ranks().sum_parts(counts).tolist())

    def _integral_from_first_knot(self, x: Tensor) -> Tensor:
        """Σ_i ∫ B_j from the first knot to x_i, for every j."""
        knots = self._knots_on(x)
        lengths = knots.diff()
        interval, t = self._intervals(x)

        def by_interval(values: Tensor) -> Tensor:
            return x.new_zeros(len(lengths)).index_add(0, interval, values)

        number, first, second = (by_interval(v) for v in (torch.ones_like(t), t, t.square()))
        beyond = number.flip(0).cumsum(0).flip(0) - number  # points above each interval
        left = lengths * (first - second / 2 + beyond / 2)
        right = lengths * (second / 2 + beyond / 2)
        zero = x.new_zeros(1)
        return torch.cat([left, zero]) + torch.cat([zero, right])

    def _intervals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The interval of every point, and where in it: 0 at its left end, 1 at its right end."""
        knots = self._knots_on(x)
        # A sum is contiguous in memory, also under vmap; searchsorted warns otherwise.
        interval = torch.searchsorted(knots, x.detach() + 0.0, right=True) - 1
        interval = interval.clamp(0, len(knots) - 2)
        return interval, (x - knots[interval]) / knots.diff()[interval]

    def _knots_on(self, x: Tensor) -> Tensor:
        return torch.tensor(self.shape.knots, dtype=torch.float64, device=x.device)

    def _summed(self, hats: Tensor) -> Tensor:
        """Of a convex shape, sums over the hats from each knot on: what s′ rises by there stays."""
        return hats.flip(-1).cumsum(-1).flip(-1) if self.shape.convex else hats
