"""From gradients to blocks: rows of [design | targets] are read in slices and factorised."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from tacit.equations.equations import Block
from tacit.equations.factors import FactorSum, triangular_factor
from tacit.equations.sources import Family
from tacit.errors import InputError, check_number, check_type
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, layer_of, select, shorten, to_float64
from tacit.regularizers.family import (
    Columns,
    Regularizer,
    Subspace,
    check_one_strength,
    difference_of,
    join_columns,
    smallest_subspace,
)

CHUNK, DEVICE_CHUNK = 2**18, 2**24
"""Largest number of entries of [design | targets] that are read at once: on the CPU so few that
they stay in its cache (2 MiB), on other devices so many that starting a kernel costs little
(128 MiB)."""
KNOT_POINTS = 9
"""The knots of splines are set at the weights of at most so many points of a trajectory."""

Averaged = Mapping[Regularizer, Columns]
"""For regularizers that were averaged over an epoch, their mean columns."""
ScaledByTime = bool | Collection[Regularizer]
"""Whether columns are multiplied by each step's time; or of which regularizers."""


@dataclass(frozen=True, eq=False)
class BoundCandidates:
    """Regularizers at a point: the columns to estimate, and known columns with their strengths."""

    params: Params
    rows: tuple[str, ...]
    """Names of the parameters whose equations are written."""
    families: tuple[Family, ...]
    columns: Columns
    known: list[tuple[float, Columns]]
    """Known columns, each times what is to be subtracted from the target: its strength, or 0 where
    the target has it already."""
    weights: Params = field(default_factory=dict)
    """By parameter, what its rows are multiplied by; empty for one."""
    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By family with knots, how many weights lie between them."""
    _space: dict[str, Subspace | None] = field(default_factory=dict, init=False)
    """The subspace of the tensor that was read last."""

    def families_on(self, name: str) -> list[Columns]:
        """The columns, estimated and known, that cover a tensor."""
        return [f for f in (self.columns, *(k for _, k in self.known)) if name in f.active]

    def weight_of(self, name: str, part: slice) -> Tensor:
        """What the rows of a slice are multiplied by, as one column."""
        weight = self.weights[name].flatten()
        return (weight if len(weight) == 1 else weight[part])[:, None]

    def subspace(self, name: str) -> Subspace | None:
        """The directions of a tensor that have equations, where they are not single entries."""
        if name not in self._space:
            self._space.clear()  # it may be as large as the tensor
            self._space[name] = smallest_subspace(self.families_on(name), name)
        return self._space[name]

    def slices(self, name: str, width: int) -> Iterator[slice]:
        """Slices of a flattened tensor; only one where its equations are not single entries."""
        if self.subspace(name) is None:
            return slices(self.params[name], width)
        return iter([slice(0, self.params[name].numel())])


@dataclass(frozen=True, eq=False)
class Candidates:
    """The regularizers of a call, checked: those to estimate, and those that are known."""

    estimated: tuple[Regularizer, ...]
    known: dict[Regularizer, float]
    followed: bool = False
    """Whether the reference of a trajectory followed the known penalties, so that the target has
    them already."""
    per_time: tuple[bool, ...] = ()
    """For each to estimate, whether its columns are multiplied by each step's time; () for none."""

    def scaled_by_time(self, scaled: ScaledByTime) -> "Candidates":
        """The candidates, all or some of them with columns that are multiplied by time."""
        if isinstance(scaled, bool):
            return replace(self, per_time=(True,) * len(self.estimated) if scaled else ())
        check_type("scaled_by_time", scaled, Collection, "True, or a list of the regularizers")
        if unknown := [r for r in scaled if r not in self.estimated]:
            names = ", ".join(str(getattr(r, "name", r)) for r in unknown)
            raise InputError(
                f"scaled_by_time has {names}, which is not among the candidates: pass True, or a "
                "list of the same objects."
            )
        return replace(self, per_time=tuple(r in scaled for r in self.estimated))

    def of_flow(self, objective: Objective, *, followed: bool) -> "Candidates":
        """The candidates of a trajectory, which followed the flow of L + Σ known.

        What discrete steps add to that flow is a multiple of ‖∇(L + Σ known)‖², so that
        `gradient_norm(objective)` has the known penalties too.
        """
        estimated = tuple(
            r if r.with_known is None or r.objective is not objective else r.with_known(self.known)
            for r in self.estimated
        )
        return replace(self, estimated=estimated, followed=followed)

    def kinked(self, *, averaged: Iterable[Regularizer] = ()) -> tuple[Regularizer, ...]:
        """Those to estimate that have a kink at zero, and no columns averaged over an epoch."""
        means = set(averaged)
        return tuple(r for r in self.estimated if r.with_zero_width and r not in means)

    def place_knots(self, points: Sequence[Params], read: Callable[[Params], Params]) -> None:
        """Set the knots of splines at the weights of all these points, or of a few among many.

        Each of those is first read: checked, and on the model's device.
        """
        last = len(points) - 1
        few = sorted({round(i * last / (KNOT_POINTS - 1)) for i in range(KNOT_POINTS)})
        for place in [r.place_knots for r in self.estimated if r.place_knots is not None]:
            place([read(points[i]) for i in few])

    def with_zero_width(self, width: float, kinked: Sequence[Regularizer]) -> "Candidates":
        """The candidates, with another zero width for some of them."""
        estimated = tuple(
            r.with_zero_width(width) if r.with_zero_width and r in kinked else r
            for r in self.estimated
        )
        return replace(self, estimated=estimated)

    def bind(
        self,
        params: Params,
        rows: Scope = None,
        *,
        averaged: Averaged | None = None,
        metric: Params | None = None,
        unreached: Sequence[str] = (),
        time: float = 0.0,
        weights: Params | None = None,
        start: Params | None = None,
    ) -> BoundCandidates:
        """All columns at these parameters.

        Args:
            params: the point.
            rows: which parameters' equations are written; by default all.
            averaged: the columns that are means over an epoch.
            metric: the optimizer's metric at that time, for penalties that are in it.
            unreached: parameters that the loss does not reach; they have no equations.
            time: the time of a step, for columns that are multiplied by it.
            weights: by parameter, what the rows of equations are multiplied by.
            start: a point whose columns are subtracted.
        """
        averaged, regularizers = averaged or {}, (*self.estimated, *self.known)
        check_averaged(averaged, regularizers)
        in_metric = {r: r.in_metric(metric) for r in regularizers if metric and r.in_metric}
        parts = {r: averaged.get(r) or in_metric.get(r, r).bind(params) for r in regularizers}
        if start is not None:
            parts = {r: difference_of(part, r.bind(start)) for r, part in parts.items()}
        per_time = dict(zip(self.estimated, self.per_time, strict=False))
        parts |= {r: parts[r].scaled(time) for r, scaled in per_time.items() if scaled}
        columns = join_columns([parts[r] for r in self.estimated])
        known_names = [r.name for r in self.known]
        for what, names in (("regularizers", columns.names), ("known penalties", known_names)):
            if repeated := [name for name, times in Counter(names).items() if times > 1]:
                raise InputError(
                    f"several {what} are named {shorten(repeated)}: give each a name with name=, "
                    "as in tacit.l2(scope='*.bias', name='l2 of biases')."
                )
        for r in self.known:
            check_one_strength(r, len(parts[r].names))
            if parts[r].noisy:
                raise InputError(
                    f"known penalty {r.name!r} is computed from random probes, whose noise would "
                    "be in the target unseen: pass more probes= as a candidate instead, and "
                    "compare its strength with the known one, or make its column exact."
                )
        families = tuple(
            _family(r, parts[r], r.definition + " per time" * per_time.get(r, 0))
            for r in self.estimated
        )
        known = [(0.0 if self.followed else s, parts[r]) for r, s in self.known.items()]
        names = reached_rows(select(params, rows, what="rows"), unreached)
        counts = {  # weights without equations are no evidence
            r.name: shape.counts
            for r in self.estimated
            if (shape := parts[r].shape) is not None and parts[r].active.keys() <= set(names)
        }
        return BoundCandidates(params, names, families, columns, known, weights or {}, counts)


def _family(regularizer: Regularizer, columns: Columns, definition: str) -> Family:
    family = Family(regularizer.name, regularizer.kind, len(columns.names), definition)
    if (shape := columns.shape) is None:
        return family
    bounded = shape.bounded if shape.convex else ()
    return replace(family, shape=replace(shape, counts=()), bounded=bounded)


def reached_rows(names: Sequence[str], unreached: Sequence[str]) -> tuple[str, ...]:
    """The names without those that the loss does not reach; refused if none is left."""
    reached = tuple(n for n in names if n not in unreached)
    if not reached:
        raise InputError(
            f"the loss reaches none of the parameters that rows= covers ({shorten(names)}): an "
            "unused part of the model has no equations. Choose other rows."
        )
    return reached


def check_averaged(averaged: Iterable[Regularizer], candidates: Iterable[Regularizer]) -> None:
    """Refuse another object with an averaged regularizer's name: means are found by identity."""
    by_name = {regularizer.name: regularizer for regularizer in averaged}
    for candidate in candidates:
        if by_name.get(candidate.name, candidate) is not candidate:
            raise InputError(
                f"{candidate.name!r} was averaged while training, but this is another object of "
                "that name: pass the object that was averaged, such as the one in "
                "Plan(averaged=…), or give this one another name."
            )


def check_candidates(
    regularizers: Regularizer | Sequence[Regularizer], known: Mapping[Regularizer, float] | None
) -> Candidates:
    """The regularizers of a call as `Candidates`; anything else is refused."""
    if isinstance(regularizers, Regularizer):
        regularizers = [regularizers]
    if not isinstance(regularizers, Sequence) or not regularizers:
        raise InputError(
            f"regularizers is {regularizers!r}: pass at least one, as in [tacit.l2()]."
        )
    _check_regularizers(regularizers)
    return Candidates(tuple(regularizers), check_known(known))


def check_known(known: Mapping[Regularizer, float] | None) -> dict[Regularizer, float]:
    """Known penalties with their strengths as a dictionary; anything else is refused."""
    if known is None:
        return {}
    needed = "a dictionary from penalty to strength, as in {tacit.l2(): 5e-5}"
    check_type("known", known, Mapping, needed)
    _check_regularizers(known)
    for penalty, strength in known.items():
        check_number(f"the known strength of {penalty.name!r} (w/2 for weight_decay=w)", strength)
    return dict(known)


def _check_regularizers(candidates: Iterable[Regularizer]) -> None:
    for candidate in candidates:
        if not isinstance(candidate, Regularizer):
            hint = " Call it, as in tacit.l2()." if callable(candidate) else ""
            raise InputError(
                f"a regularizer is a {type(candidate).__name__}: pass what tacit.l2() or "
                f"tacit.regularizer(name, function) returns.{hint}"
            )


def write_blocks(
    bound: BoundCandidates, targets: Sequence[Params], *, floors: Mapping[str, float]
) -> list[Block]:
    """The equations at one point as one block per layer.

    The whole design is never in memory: each slice of rows is merged into the layer's factor.
    """
    blocks = []
    layers: dict[str, list[str]] = {}
    for name in bound.rows:
        layers.setdefault(layer_of(name), []).append(name)
    for layer, names in layers.items():
        active = sorted({c for name in names for c in bound.columns.active.get(name, ())})
        width = len(active) + len(targets)
        scatter = ScatterSum(bound, names, width)
        # Biases first: with them, the first rows show which columns are independent.
        by_size = sorted(names, key=lambda name: bound.params[name].numel())
        parts = [(name, part) for name in by_size for part in bound.slices(name, width)]
        rows, left_out = FactorSum(width), 0
        for name, part in parts:
            matrix, at_kinks = read_block(bound, name, part, active, targets)
            rows.add(matrix)
            scatter.add(name, part, matrix)
            left_out = at_kinks + left_out
        left_out = int(left_out)  # read from the device once
        row_count = sum(bound.params[name].numel() for name in names) - left_out
        read = partial(_slices_of, bound, parts, active, targets)
        factor = rows.factor(read)
        if not torch.isfinite(factor).all():
            raise InputError(
                f"the equations of layer {layer} overflow: a regularizer's gradient or a target "
                "is not finite there. Leave that layer out with rows=."
            )
        floor = sum(floors[name] ** 2 for name in names) ** 0.5
        block = Block(layer, tuple(active), factor, row_count, left_out, floor)
        blocks.append(scatter.attach(block))
    return blocks


def _slices_of(
    bound: BoundCandidates,
    parts: Sequence[tuple[str, slice]],
    active: list[int],
    targets: Sequence[Params],
) -> Iterator[Tensor]:
    """Rows [design | targets] of these parts of tensors, with zeros at kinks."""
    return (read_block(bound, name, part, active, targets)[0] for name, part in parts)


class ScatterSum:
    """The scatter of a block's noisy columns, summed over slices; see `tacit.equations.noise`."""

    def __init__(self, bound: BoundCandidates, names: Sequence[str], width: int) -> None:
        self.bound = bound
        self.noisy = sorted({c for name in names for c in bound.columns.noisy_on(name)})
        size = bound.columns.groups * len(self.noisy)
        self.products = torch.zeros(width + size, size, dtype=torch.float64)

    def add(self, name: str, part: slice, matrix: Tensor, weight: float = 1.0) -> None:
        """Add a slice of a tensor, whose rows `read_block` returns, times a weight."""
        bound, columns = self.bound, self.bound.columns.noisy_on(name)
        if not columns:
            return
        entries = bound.columns.deviations(name, part).to(matrix)
        deviations = entries.new_zeros(*entries.shape[:2], len(self.noisy))
        deviations[:, :, [self.noisy.index(column) for column in columns]] = entries
        D = deviations.flatten(1)
        if (space := bound.subspace(name)) is not None:
            D = space.project(D)
        if name in bound.weights:
            D = D * bound.weight_of(name, part).to(D)
        if (kinks := kinks_on(bound, name, part)) is not None:
            D = D.masked_fill(kinks.to(D.device)[:, None], 0.0)
        rows = torch.cat([matrix, D], dim=1)
        self.products += (weight**2 * rows.T @ D).cpu()

    def attach(self, block: Block) -> Block:
        """The block with this scatter."""
        if not self.noisy:
            return block
        return replace(block, noisy=tuple(self.noisy), scatter=self.products)


def kinks_on(bound: BoundCandidates, name: str, part: slice) -> Tensor | None:
    """Which rows of a slice are at kinks; None where there are none."""
    masks = [mask for f in bound.families_on(name) if (mask := f.kinks(name, part)) is not None]
    if not masks:
        return None
    kinks = torch.stack([mask.to(masks[0].device) for mask in masks]).any(0)
    return kinks if bound.subspace(name) is None else kinks.any().expand(len(kinks))


def write_means(
    points: Sequence[tuple[BoundCandidates, Sequence[Params]]],
) -> list[Block]:
    """√m times the mean of [design | target] over m points, as one block per layer.

    A row at a kink at one point counts as zero there. There are no blocks where points have
    equations of other parameters, or along a subspace, which differs between points.
    """
    first, targets = points[0]
    names = first.rows
    if any(b.rows != names or b.subspace(n) is not None for b, _ in points for n in names):
        return []
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(layer_of(name), []).append(name)
    blocks = []
    for layer, members in layers.items():
        active = sorted(
            {c for b, _ in points for n in members for c in b.columns.active.get(n, ())}
        )
        width, rows = len(active) + len(targets), 0
        factor = torch.zeros(0, width, dtype=torch.float64)
        for name in members:
            for part in slices(first.params[name], width):
                total = sum(read_block(b, name, part, active, t)[0] for b, t in points)
                total = total / len(points) ** 0.5
                factor = triangular_factor(torch.cat([factor.to(total), total]))
                rows += len(total)
        blocks.append(Block(layer, tuple(active), factor.cpu(), rows, 0, 0.0, points=len(points)))
    return blocks


def slices(tensor: Tensor, width: int) -> Iterator[slice]:
    """Slices of a flattened tensor; in `width` columns each has few entries (see `CHUNK`)."""
    chunk = CHUNK if tensor.is_cpu else DEVICE_CHUNK
    size, height = tensor.numel(), max(1, chunk // max(1, width))
    for start in range(0, size, height):
        yield slice(start, min(start + height, size))


def read_rows(
    bound: BoundCandidates,
    name: str,
    part: slice,
    targets: Sequence[Params],
    *,
    columns: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The design, the targets without known penalties, and the mask of kinks, on one slice.

    The design has the columns of `bound.columns.active[name]`; it is empty without `columns`.
    Rows at kinks are in no equation; the mask is None where there are none. Where the equations are
    along a subspace, design and targets are projected on it (`bound.slices` has the whole tensor);
    with kinks of single entries beside it, no row is left.
    """
    flat = [to_float64(target[name].flatten()[part]) for target in targets]
    empty = torch.zeros(part.stop - part.start, 0, dtype=torch.float64)
    values = torch.stack(flat).mT if flat else empty
    for strength, known in bound.known if flat else ():
        if name in known.active:
            values = values - strength * known.rows(name, part).to(values)
    active = name in bound.columns.active
    design = bound.columns.rows(name, part) if active and columns else empty.to(values)
    if (space := bound.subspace(name)) is not None:
        design, values = space.project(design), space.project(values)
    if name in bound.weights:
        weight = bound.weight_of(name, part)
        design, values = design * weight.to(design), values * weight.to(values)
    return design, values, kinks_on(bound, name, part)


def read_block(
    bound: BoundCandidates, name: str, part: slice, active: list[int], targets: Sequence[Params]
) -> tuple[Tensor, Tensor | int]:
    """[design | targets] of a layer on a slice, and how many of its rows are in no equation.

    Rows at kinks, which are in none, are zero. Columns lie one after the other in memory.
    """
    design, values, kinks = read_rows(bound, name, part, targets)
    columns = bound.columns.active.get(name, ())
    if tuple(active) == columns:
        matrix = torch.cat([design.mT.to(values), values.mT]).mT
    else:
        matrix = values.new_zeros(len(active) + len(targets), len(values)).mT
        for place, column in enumerate(columns):
            matrix[:, active.index(column)] = design[:, place]
        matrix[:, len(active) :] = values
    left_out = count_left_out(bound, name, kinks)
    if kinks is not None and not (kinks.is_cpu and not left_out):
        matrix.masked_fill_(kinks.to(matrix.device)[:, None], 0.0)
    return matrix, left_out


def count_left_out(bound: BoundCandidates, name: str, kinks: Tensor | None) -> Tensor | int:
    """How many rows of a slice are in no equation; a tensor, so that the device need not wait."""
    space = bound.subspace(name)
    if kinks is not None and (space is None or kinks.any()):
        return kinks.sum()
    return 0 if space is None else bound.params[name].numel() - space.dimension
