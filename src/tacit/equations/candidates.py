"""The regularizers of a call: checked, bound at a point, and their columns there."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from tacit.equations.sources import Family
from tacit.errors import InputError, check_number, check_type
from tacit.objective.objective import Objective
from tacit.objective.params import Params, Scope, select, shorten
from tacit.objective.ranks import current_ranks
from tacit.regularizers.family import (
    Columns,
    EntrywiseFunction,
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
    gathers: bool = False
    """Whether a column needs whole tensors, which are gathered where processes share their rows."""
    _space: dict[str, Subspace | None] = field(default_factory=dict, init=False)
    """The subspace of the tensor that was read last."""

    def families_on(self, name: str) -> list[Columns]:
        """The columns, estimated and known, that cover a tensor."""
        return [f for f in (self.columns, *(k for _, k in self.known)) if name in f.active]

    def functions_on(self, name: str) -> tuple[EntrywiseFunction, ...] | None:
        """The functions of single entries that the equations of a tensor consist of, if they do."""
        if not self.columns.functions or self.known or name in self.weights:
            return None
        return tuple(self.columns.functions[c] for c in self.columns.active.get(name, ()))

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

    @property
    def are_of_weights(self) -> bool:
        """Whether all are penalties of the weights alone, which dropout, for example, is not."""
        return all(r.cost == "weights" and not r.custom for r in (*self.estimated, *self.known))

    def kinked(self, *, averaged: Iterable[Regularizer] = ()) -> tuple[Regularizer, ...]:
        """Those to estimate that have a kink at zero, and no columns averaged over an epoch."""
        means = set(averaged)
        return tuple(r for r in self.estimated if r.with_zero_width and r not in means)

    def described(self, rows: Scope) -> str:
        """What tells the equations of these rows from those of other candidates."""
        estimated = [f"{r.name} ({r.definition or r.kind})" for r in self.estimated]
        known = [f"{r.name} ({r.definition or r.kind}): {s:.6g}" for r, s in self.known.items()]
        scope = "a function" if callable(rows) else rows
        return f"{estimated}, known={known}, scaled_by_time={self.per_time}, rows={scope}"

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
        check_readable(regularizers)
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
        gathers = any(r.reads != "rows" for r in regularizers)
        return BoundCandidates(
            params, names, families, columns, known, weights or {}, counts, gathers
        )


def check_readable(regularizers: Iterable[Regularizer]) -> None:
    """Refuse what needs all parameters at once, where processes share their rows."""
    names = [r.name for r in regularizers if r.reads == "model"]
    if names and current_ranks().shards is not None:
        raise InputError(
            f"{shorten(names)} is a function of all parameters, of which each process has a part: "
            "use penalties of entries, rows or matrices, or gather the full state dict and load it "
            "into an unwrapped copy of the model."
        )


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
    if isinstance(regularizers, Mapping) and regularizers:
        raise InputError(
            "regularizers is a dictionary, as of optimizer_penalties: pass its keys, as in "
            "[*penalties], to estimate their strengths, or known=penalties to subtract them."
        )
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


def slices(tensor: Tensor, width: int) -> Iterator[slice]:
    """Slices of a flattened tensor; in `width` columns each has few entries (see `CHUNK`).

    There is at least one: what gathers whole tensors is read by processes without rows too.
    """
    chunk = CHUNK if tensor.is_cpu else DEVICE_CHUNK
    size, height = tensor.numel(), max(1, chunk // max(1, width))
    for start in range(0, max(1, size), height):
        yield slice(start, min(start + height, size))
