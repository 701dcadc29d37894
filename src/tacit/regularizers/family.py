"""The contract of a regularizer: named gradient columns ∇R_j(θ), read in slices, and values R_j(θ).

Also what applies to every family: joining columns, families that are sums over tensors, and
splitting such a family by layer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tacit.errors import InputError, check_number
from tacit.objective.objective import Objective
from tacit.objective.params import (
    Params,
    Scope,
    entries_of,
    float64_zeros,
    select,
    shorten,
    to_float64,
)
from tacit.objective.ranks import current_ranks

FamilyKind = Literal["", "l2", "smooth_l1", "diagonal", "symmetric", "spline"]
"""Families that diagnostics, `Fit.matrix()` and `Fit.curve()` treat specially; "" for others."""


Cost = Literal["weights", "pass", "second-order"]
"""What a regularizer's columns take: only the weights, passes over the data, or passes with second
derivatives of the loss."""

Extent = Literal["rows", "tensors", "model"]
"""What an entry of a column is computed from: its row of the tensor (a slice along the first
dimension), its tensor, or all parameters."""

ZERO_WIDTH = 1e-9
"""Weights, groups and singular values below this part of the largest count as zero."""


class Subspace(NamedTuple):
    """The directions of one tensor in which R has a derivative; it has none in the others.

    The equations of the tensor are then those along the subspace.
    """

    dimension: int
    project: Callable[[Tensor], Tensor]
    """The orthogonal projection of vectors, of shape (entries of the tensor, vectors)."""
    reason: str = "low rank"
    """Why there are no other directions. Subspaces of one tensor and reason contain each other."""


@dataclass(frozen=True)
class Shape:
    """The knots of a penalty Σ s(x_i) whose s′ is linear between them; see `spline`."""

    knots: tuple[float, ...]
    even: bool = False
    """Whether s′(x) = sign(x) h(|x|), and the knots are of |x|."""
    convex: bool = False
    """Whether strengths are the first value of s′ and its rises, which are zero or above."""
    of: str = "weights"
    """What x are: weights, or singular values."""
    counts: tuple[int, ...] = ()
    """How many x lie below the first knot, between each two, and above the last."""

    @property
    def bounded(self) -> tuple[bool, ...]:
        """Which strengths are zero or above."""
        return tuple(self.convex and (self.even or j > 0) for j in range(len(self.knots)))


class TensorGradient(NamedTuple):
    """∇R on one flattened tensor, as functions of a slice of it."""

    at: Callable[[slice], Tensor]
    """The gradient on the slice, in float64."""
    kinks: Callable[[slice], Tensor | None] = lambda part: None
    """Which rows of the slice have no gradient; None if R is differentiable everywhere."""
    subspace: Subspace | None = None
    """The directions in which R is differentiable, where they are not single entries."""


class EntrywiseFunction(NamedTuple):
    """A function r of one entry, for families R(θ) = Σ_i r(θ_i) with ∇R(θ)_i = r′(θ_i).

    All fields act on tensors of any shape, so that the parameters of many models can be stacked.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    kinks: Callable[[Tensor], Tensor | None] = lambda theta: None
    """Which entries have no derivative; None if r is differentiable everywhere."""

    def tensor_value(self, tensor: Tensor, _: str) -> Tensor:
        """R on one tensor, for `separable`."""
        return self.value(tensor).sum()

    def tensor_gradient(self, tensor: Tensor, _: str) -> TensorGradient:
        """∇R on one tensor, for `separable`."""
        return TensorGradient(
            at=lambda part: self.derivative(to_float64(entries_of(tensor, part))),
            kinks=lambda part: self.kinks(entries_of(tensor, part)),
        )


@dataclass(frozen=True, eq=False)
class Columns:
    """The gradient columns ∇R_j of a family at fixed parameters: one column per strength.

    The columns are read in slices, so that the whole design matrix need not fit into memory.

    Args:
        names: the name of every column.
        active: for each tensor, by name, the indices of the columns that are not zero on it.
            Tensors that no column covers are absent.
        rows: rows(tensor_name, part) returns the active columns on a slice of the flattened
            tensor, in float64, with shape (rows, active columns).
        kinks: kinks(tensor_name, part) marks the rows of the slice where R is not differentiable
            (its optimality condition there is an inequality), or returns None if R is
            differentiable on the whole tensor.
        subspace: subspace(tensor_name) returns the directions in which R is differentiable where
            they are not single entries (nuclear norm of a matrix of low rank), or None.
        noisy: indices of the columns that are random: means over independent groups of probes.
        groups: the number of these groups; 0 where no column is noisy.
        deviations: deviations(tensor_name, part) returns each group's column minus the mean, for
            the active noisy columns, in float64, with shape (rows, groups, active noisy columns).
        shape: the knots, for a family whose strengths are a curve.
        functions: for columns that are r′ of single entries, r, one per column; else empty. Slices
            of several tensors can then be read together.
    """

    names: tuple[str, ...]
    active: dict[str, tuple[int, ...]]
    rows: Callable[[str, slice], Tensor]
    kinks: Callable[[str, slice], Tensor | None] = lambda tensor_name, part: None
    subspace: Callable[[str], Subspace | None] = lambda tensor_name: None
    noisy: tuple[int, ...] = ()
    groups: int = 0
    deviations: Callable[[str, slice], Tensor] = lambda tensor_name, part: torch.zeros(0, 0, 0)
    shape: Shape | None = None
    functions: tuple[EntrywiseFunction, ...] = ()

    def noisy_on(self, tensor_name: str) -> list[int]:
        """The noisy columns that are not zero on a tensor, in the order of `deviations`."""
        return [c for c in self.active.get(tensor_name, ()) if c in self.noisy]

    def scaled(self, factor: float) -> "Columns":
        """The columns times a number."""
        return replace(
            self,
            rows=lambda tensor_name, part: factor * self.rows(tensor_name, part),
            deviations=lambda tensor_name, part: factor * self.deviations(tensor_name, part),
            functions=(),
        )


@dataclass(frozen=True, eq=False)
class Regularizer:
    """A family of penalties R(θ) = Σ_j λ_j R_j(θ), linear in its strengths λ.

    Most families have one strength, and its column has the family's name. Regularizers compare by
    identity, so that they can be keys of `known=`.

    Args:
        name: the name that strengths are listed under.
        bind: bind(params) returns the columns ∇R_j at these parameters.
        value: value(params) returns R_j(θ) for every j, as a 1-D tensor that autograd can
            differentiate (needed for retraining).
        separable: whether R is a sum over tensors, so that it can be split by layer.
        kind: identifies the families that diagnostics and `Fit.matrix()` treat specially, because
            the name can be chosen freely.
        definition: what distinguishes penalties of one kind and name, such as smooth_l1(beta=0.1);
            equations of different ones are not stacked.
        entrywise: the function of one entry, if R is a sum of one function over all entries.
        influence: for a penalty that depends on data, influence(params, directions) returns the
            change of ⟨∇R_j, v⟩ with each example, for every direction v, up to a constant shared
            by all examples; shape (examples, directions, columns).
        objective: for a penalty that depends on data, the objective that it is computed from.
        custom: whether it is the caller's function, which may read data.
        cost: what its columns take.
        reads: what an entry of a column is computed from; of models whose rows several processes
            share, only "rows" and "tensors" can be used.
        in_metric: for a penalty in an optimizer's metric, in_metric(metric) returns the same one in
            the metric of another time.
        with_known: for a penalty of L's own gradient, with_known(known) returns the same penalty of
            L + Σ known, for trajectories whose reference follows that flow.
        with_zero_width: for a penalty with a kink at zero, with_zero_width(width) returns the same
            penalty with another zero width.
        place_knots: for a spline, place_knots(points) sets its knots at the weights of several
            points, unless they are set already.
    """

    name: str
    bind: Callable[[Params], Columns] = field(repr=False)
    value: Callable[[Params], Tensor] = field(repr=False)
    separable: bool = False
    kind: FamilyKind = ""
    definition: str = ""
    entrywise: EntrywiseFunction | None = field(default=None, repr=False)
    influence: Callable[[Params, Sequence[Params]], Tensor] | None = field(default=None, repr=False)
    objective: Objective | None = field(default=None, repr=False)
    custom: bool = field(default=False, repr=False)
    cost: Cost = field(default="weights", repr=False)
    reads: Extent = field(default="model", repr=False)
    in_metric: Callable[[Params], "Regularizer"] | None = field(default=None, repr=False)
    with_known: Callable[[Mapping["Regularizer", float]], "Regularizer"] | None = field(
        default=None, repr=False
    )
    with_zero_width: Callable[[float], "Regularizer"] | None = field(default=None, repr=False)
    place_knots: Callable[[Sequence[Params]], None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InputError(
                f"a regularizer's name is {self.name!r}: pass a string that is not empty."
            )

    def gradient(self, params: Params, names: Iterable[str] | None = None) -> dict[str, Params]:
        """Every column as a dictionary of whole tensors, restricted to the named tensors.

        For inspection and tests. The estimators read `bind(params)` in slices instead, because
        this holds one parameter-sized vector per column.
        """
        columns = self.bind(params)
        selected = params if names is None else {n: params[n] for n in names}
        gradients = {column: float64_zeros(selected) for column in columns.names}
        for name in filter(columns.active.__contains__, selected):  # in one order everywhere
            rows, shape = columns.rows(name, slice(0, params[name].numel())), params[name].shape
            for column, entries in zip(columns.active[name], rows.T, strict=True):
                gradients[columns.names[column]][name] = entries.reshape(shape)
        return gradients


def join_columns(families: Sequence[Columns]) -> Columns:
    """The columns of several families side by side."""
    names: tuple[str, ...] = ()
    active: dict[str, tuple[int, ...]] = {}
    noisy: tuple[int, ...] = ()
    for family in families:
        for tensor_name, columns in family.active.items():
            joined = (len(names) + column for column in columns)
            active[tensor_name] = (*active.get(tensor_name, ()), *joined)
        noisy += tuple(len(names) + column for column in family.noisy)
        names += family.names
    groups = {family.groups for family in families if family.noisy}
    if len(groups) > 1:
        raise InputError(
            f"columns have {' and '.join(map(str, sorted(groups)))} groups of probes: give all "
            "of them the same probes=, because their noise is compared group by group."
        )

    def rows(tensor_name: str, part: slice) -> Tensor:
        blocks = [f.rows(tensor_name, part).mT for f in families if tensor_name in f.active]
        return torch.cat(blocks).mT  # columns lie one after the other in memory

    def kinks(tensor_name: str, part: slice) -> Tensor | None:
        masks = [f.kinks(tensor_name, part) for f in families if tensor_name in f.active]
        masks = [mask for mask in masks if mask is not None]
        return torch.stack(masks).any(0) if masks else None

    def subspace(tensor_name: str) -> Subspace | None:
        return smallest_subspace([f for f in families if tensor_name in f.active], tensor_name)

    def deviations(tensor_name: str, part: slice) -> Tensor:
        parts = [f.deviations(tensor_name, part) for f in families if f.noisy_on(tensor_name)]
        return torch.cat(parts, dim=2)

    functions = tuple(function for family in families for function in family.functions)
    return Columns(
        names, active, rows, kinks, subspace, noisy, max(groups, default=0), deviations,
        functions=functions if len(functions) == len(names) else (),
    )  # fmt: skip


def difference_of(end: Columns, start: Columns) -> Columns:
    """The columns of one family at one point minus those at another."""
    if end.noisy:
        raise InputError(
            f"the columns of {shorten(end.names)} are from random probes, whose noise would differ "
            "between the two points of a path: make them exact."
        )
    if end.names != start.names or end.active != start.active:
        raise InputError(
            f"{shorten(end.names)} cannot be subtracted from itself at the first point: it has "
            "other columns there."
        )
    both = join_columns([end, start])

    def rows(tensor_name: str, part: slice) -> Tensor:
        return end.rows(tensor_name, part) - start.rows(tensor_name, part)

    def kinks(tensor_name: str, part: slice) -> Tensor | None:
        # A path that starts where all columns are zero starts at the minimum of R, at zero weights:
        # 0 is a subgradient there.
        masks = [end.kinks(tensor_name, part), start.kinks(tensor_name, part)]
        if masks[1] is not None:
            masks[1] = masks[1] & (start.rows(tensor_name, part) != 0).any(1).to(masks[1].device)
        present = [mask for mask in masks if mask is not None]
        return torch.stack(present).any(0) if present else None

    return replace(
        both, names=end.names, active=end.active, rows=rows, kinks=kinks, shape=end.shape,
        functions=(),
    )  # fmt: skip


def smallest_subspace(families: Iterable[Columns], tensor_name: str) -> Subspace | None:
    """The directions of a tensor in which all families are differentiable.

    Those of one matrix and reason contain each other, so that the smallest is their intersection.
    """
    spaces = [space for f in families if (space := f.subspace(tensor_name)) is not None]
    if len(reasons := {space.reason: None for space in spaces}) > 1:
        raise InputError(
            f"the candidates have no gradient at {tensor_name!r} for several reasons "
            f"({', '.join(reasons)}), and there are no equations along the directions that remain. "
            "Leave one of the penalties of singular values out, or limit its scope."
        )
    return min(spaces, key=lambda space: space.dimension, default=None)


def describe_of(of: Scope) -> str:
    """Which parameters a derivative is by, for definitions; a function has no text."""
    return "" if of is None else f"of={of!r}" if isinstance(of, str | list) else "of=…"


def check_one_strength(known: Regularizer, strengths: int) -> None:
    """Refuse a known penalty of several strengths."""
    if strengths != 1:
        raise InputError(
            f"known penalty {known.name!r} has {strengths} coefficients: known= takes penalties of "
            "one strength."
        )


def weighted_gradient(penalties: Mapping[Regularizer, float], params: Params) -> Params:
    """Σ s_k ∇R_k(θ) of penalties with one strength each, in float64."""
    total = float64_zeros(params)
    for regularizer, strength in penalties.items():
        columns = list(regularizer.gradient(params).values())
        check_one_strength(regularizer, len(columns))
        for name, entries in columns[0].items():
            total[name].add_(entries, alpha=strength)
    return total


def whole_column(name: str, gradient: Params) -> Columns:
    """One column from a gradient that is in memory as whole tensors."""
    return Columns(
        names=(name,),
        active=dict.fromkeys(gradient, (0,)),
        rows=lambda tensor_name, part: to_float64(entries_of(gradient[tensor_name], part))[:, None],
    )


def separable(
    name: str,
    scope: Scope,
    *,
    value: Callable[[Tensor, str], Tensor],
    gradient: Callable[[Tensor, str], TensorGradient],
    covers: Callable[[Tensor, str], bool] = lambda tensor, tensor_name: True,
    entrywise: EntrywiseFunction | None = None,
    by_row: bool = False,
) -> Regularizer:
    """A family with one strength that is a sum over tensors, R(θ) = Σ_t R_t(θ_t).

    Args:
        name: the name of the column.
        scope: which parameters it covers.
        value: value(tensor, tensor_name) returns R_t of one tensor.
        gradient: gradient(tensor, tensor_name) returns ∇R_t of one tensor.
        covers: covers(tensor, tensor_name) tells whether the penalty is defined for a tensor.
        entrywise: the function of one entry, if it is a sum over entries.
        by_row: whether it is a sum over rows, that is, slices along the first dimension.
    """
    by_row = by_row or entrywise is not None

    def covered(params: Params, *, whole: bool = True) -> tuple[str, ...]:
        in_scope = select(params, scope, what=f"scope of {name}", whole=whole)
        tensor_names = tuple(n for n in in_scope if covers(params[n], n))
        if not tensor_names:
            raise InputError(
                f"{name} is defined for none of the parameters in its scope: penalties of matrices "
                "need two or more dimensions, metric_ridge parameters that the optimizer trained. "
                "Widen its scope, or leave it out."
            )
        return tensor_names

    def bind(params: Params) -> Columns:
        # Slices are read tensor by tensor, and a gradient may be costly to prepare (row norms, a
        # singular value decomposition) and as large as its tensor: only the last one is cached.
        @lru_cache(maxsize=1)
        def gradient_of(tensor_name: str) -> TensorGradient:
            tensor = params[tensor_name].detach()
            if by_row or current_ranks().shards is None:
                return gradient(tensor, tensor_name)
            whole, here = current_ranks().whole(tensor)
            return _on_part(gradient(whole, tensor_name), here)

        return Columns(
            names=(name,),
            active=dict.fromkeys(covered(params), (0,)),
            rows=lambda tensor_name, part: gradient_of(tensor_name).at(part).unsqueeze(1),
            kinks=lambda tensor_name, part: gradient_of(tensor_name).kinks(part),
            subspace=lambda tensor_name: gradient_of(tensor_name).subspace,
            functions=() if entrywise is None else (entrywise,),
        )

    def total(params: Params) -> Tensor:
        if not by_row and current_ranks().shards is not None:
            raise InputError(
                f"the value of {name} is of whole matrices, of which each process has some rows: "
                "leave it out of known= where its second derivatives are needed."
            )
        in_scope = covered(params, whole=False)  # `layerwise` passes only one layer's parameters
        return torch.stack([value(params[n], n) for n in in_scope]).sum().reshape(1)

    reads = "rows" if by_row else "tensors"
    return Regularizer(name, bind, total, separable=True, entrywise=entrywise, reads=reads)


def _on_part(gradient: TensorGradient, here: slice) -> TensorGradient:
    """The gradient of a whole tensor on the entries of this process."""
    ranks = current_ranks()

    def there(part: slice) -> slice:
        return slice(here.start + part.start, here.start + part.stop)

    space = gradient.subspace
    if space is not None:
        of_whole = space.project
        space = space._replace(project=lambda vectors: of_whole(ranks.whole(vectors)[0])[here])
    return TensorGradient(
        at=lambda part: gradient.at(there(part)),
        kinks=lambda part: gradient.kinks(there(part)),
        subspace=space,
    )


def with_kink_at_zero(
    make: Callable[[Callable[[], float]], Regularizer],
    zero_width: float,
    *,
    largest: Callable[[Params], float],
) -> Regularizer:
    """A family that has no gradient where something (a weight, a group) is zero.

    Training rarely arrives at exactly zero. What is at most `zero_width` times the largest in the
    whole scope counts as zero.

    Args:
        make: make(zero) returns the family in which what is at most zero() counts as zero.
        zero_width: that part of the largest; 0 for exact zeros only.
        largest: largest(tensors) is the size of the largest weight or group among them.
    """
    check_number("zero_width", zero_width, least=0, below=1)
    exact = make(lambda: 0.0)

    def bind(params: Params) -> Columns:
        @cache
        def zero() -> float:
            tensors = {n: params[n].detach() for n in exact.bind(params).active}
            return zero_width * largest(tensors)

        if current_ranks().shards is not None:
            zero()  # all processes compare now, and may read other slices later
        return make(zero).bind(params)

    def with_zero_width(width: float) -> Regularizer:
        return with_kink_at_zero(make, width, largest=largest)

    return replace(exact, bind=bind, with_zero_width=with_zero_width)
