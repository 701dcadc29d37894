"""The trace of the loss's Hessian, exact for small models and from random probes for others."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.errors import InputError, check_type, check_whole
from tacit.objective.objective import Objective
from tacit.objective.params import (
    Params,
    Scope,
    entries_of,
    fingerprint,
    float64_zeros,
    norm,
    same_buffers,
    select,
)
from tacit.objective.third_order import random_signs
from tacit.regularizers.data_dependent import StreamedValue
from tacit.regularizers.family import Columns, Regularizer, describe_of, whole_column

EXACT = 512
"""Number of parameters up to which the trace is exact by default."""
PROBES = 32
"""Number of probes for more parameters, by default."""
GROUPS = 8
"""Groups of 16 probes or more; fewer probes are one group each."""
CHUNK = 2**26
"""Numbers in the directions of one pass over the data."""
STEP = 1e-3
"""Step of the differences that give the influence of examples, as a part of the weights' size."""


def hessian_trace(
    objective: Objective,
    probes: int | None = None,
    *,
    scope: Scope = None,
    of: Scope = None,
    seed: int = 0,
    name: str = "hessian_trace",
) -> Regularizer:
    """Trace of the loss's Hessian, R(θ) = tr H(θ), whose gradient takes third derivatives of L.

    Gaussian noise of standard deviation σ on the weights adds (σ²/2) tr H to the mean loss, to
    second order in σ.

    The trace is exact by default up to 512 parameters: one third derivative per parameter. For
    more, it is tr H = E vᵀHv over probes v of random signs, and ∇R the mean of ∇(vᵀHv). Such a
    column has noise, which would make its strength too small. The probes are therefore in
    independent groups (8, or one per probe below 16), and a fit takes products of the column with
    itself between different groups, where noise cancels on average. What is left of it has error
    bars of its own, of kind "probes"; a column that is mostly noise is a Problem.

    Every point of a trajectory or a stack has other probes, so that their noise averages out.

    Trap: a network without curvature in its parameters has none to penalise: for linear regression
    R is constant. For ReLU networks the column has the derivative between kinks only.

    Args:
        objective: the objective whose Hessian is penalised.
        probes: how many random probes; by default none (exact) up to 512 parameters, else 32. The
            column takes one pass over the data per group, and the memory of as many gradients.
        scope: which rows the column covers.
        of: which parameters the trace is over, by default all: those that the noise was on.
        seed: of the probes.
        name: the name that the strength is listed under.
    """
    needed = "the tacit.Objective whose Hessian is penalised"
    check_type("the objective of hessian_trace", objective, Objective, needed)
    _check_probes(probes)
    check_whole("seed", seed, least=0)

    trace = _Trace(objective, probes, scope, of, seed, name)
    return Regularizer(
        name,
        trace.bind,
        trace.value,
        definition=f"hessian_trace({describe_of(of)})",
        influence=trace.influence,
        objective=objective,
        cost="second-order",
    )


class _Trace(NamedTuple):
    """The arguments of `hessian_trace`, and what is computed from them."""

    objective: Objective
    probes: int | None
    scope: Scope
    of: Scope
    seed: int
    name: str

    def groups(self, params: Params, at: tuple[float, ...] = ()) -> "list[_Group]":
        """The groups of directions at a point; one, of all basis vectors, if exact."""
        names = select(params, self.of, what="of")
        entries = sum(params[n].numel() for n in names)
        if self.probes is None and entries <= EXACT:
            return [_Group(params, names, None)]
        seeds = [_mix(self.seed, at, i) for i in range(self.probes or PROBES)]
        count = GROUPS if len(seeds) >= 2 * GROUPS else len(seeds)
        return [_Group(params, names, seeds[g::count]) for g in range(count)]

    def in_scope(self, params: Params) -> tuple[str, ...]:
        """The names of the parameters that the column covers."""
        return select(params, self.scope, what=f"scope of {self.name}")

    def gradient(self, params: Params, group: "_Group") -> Params:
        """∇R from one group."""
        total = float64_zeros({n: params[n] for n in self.in_scope(params)})
        for directions in group.passes():
            part = self.objective.curvature_gradient(directions, params)
            for n, entries in total.items():
                entries.add_(part[n], alpha=1 / group.size)
        return total

    def bind(self, params: Params) -> Columns:
        """The column, with probes of this point."""
        groups = self.groups(params, fingerprint(params))
        return _mean_column(self.name, [self.gradient(params, group) for group in groups])

    def trace(self, params: Params) -> Tensor:
        """R, with the same probes at all points."""
        groups, curvature = self.groups(params), self.objective.curvature
        parts = [curvature(d, params) / g.size for g in groups for d in g.passes()]
        return torch.tensor([sum(parts) / len(groups)], dtype=torch.float64)

    def pull_back(self, params: Params, cotangent: Tensor) -> Params:
        """The gradient of that R, times a number."""
        columns = [self.gradient(params, group) for group in self.groups(params)]
        mean = {n: torch.stack([c[n] for c in columns]).mean(0) for n in columns[0]}
        return {n: cotangent[0] * entries.to(params[n]) for n, entries in mean.items()}

    def value(self, params: Params) -> Tensor:
        """R as a tensor that autograd can differentiate."""
        return StreamedValue.apply(self.trace, self.pull_back, tuple(params), *params.values())

    def influence(self, params: Params, directions: Sequence[Params]) -> Tensor:
        """The change of ⟨∇R, v⟩ with each example, for every direction v.

        It is the mean over probes u of D³ℓ_i[u, u, v], the difference of D²ℓ_i[u, v] between
        θ + hu and θ − hu, over 2h.
        """
        covered, groups = self.in_scope(params), self.groups(params, fingerprint(params))
        scoped = [{n: v[n] for n in covered if n in v} for v in directions]
        entries = sum(p.numel() for p in params.values())
        step = STEP * (norm(params) / entries**0.5 or 1.0)
        total = torch.zeros(1, len(directions), dtype=torch.float64)
        for group in groups:
            weight = 1 / (2 * step * group.size * len(groups))
            for probe in group:
                for sign in (1, -1):
                    moved = {n: p.detach() + sign * step * probe[n] for n, p in params.items()}
                    point = same_buffers(moved, params)
                    second = self.objective.directional_derivatives(scoped, point, base=probe)
                    total = total + sign * weight * second.values
        return total.unsqueeze(2)


class _Group:
    """The directions of one group: probes of random signs, or all basis vectors."""

    def __init__(self, params: Params, names: Sequence[str], seeds: Sequence[int] | None) -> None:
        self.params, self.names, self.seeds = params, names, seeds
        self.size = 1 if seeds is None else len(seeds)

    def passes(self) -> Iterator[list[Params]]:
        """The directions of each pass over the data, at most `CHUNK` numbers in all."""
        most, directions = max(1, CHUNK // sum(p.numel() for p in self.params.values())), []
        for direction in self:
            directions.append(direction)
            if len(directions) == most:
                yield directions
                directions = []
        if directions:
            yield directions

    def __iter__(self) -> Iterator[Params]:
        """The directions; the mean of their vᵀHv is the trace, the sum for basis vectors."""
        for seed in self.seeds or ():
            yield random_signs(self.params, self.names, seed=seed)
        for name in self.names if self.seeds is None else ():
            for entry in range(self.params[name].numel()):
                direction = {n: torch.zeros_like(p) for n, p in self.params.items()}
                place = torch.unravel_index(torch.tensor(entry), direction[name].shape)
                direction[name][place] = 1
                yield direction


def _mean_column(name: str, groups: Sequence[Params]) -> Columns:
    """The mean of the groups' columns; one group is exact."""
    if len(groups) == 1:
        return whole_column(name, groups[0])
    mean = {n: torch.stack([g[n] for g in groups]).mean(0) for n in groups[0]}

    def deviations(tensor_name: str, part: slice) -> Tensor:
        columns = [entries_of(g[tensor_name], part) for g in groups]
        centre = entries_of(mean[tensor_name], part)
        return (torch.stack(columns, dim=1) - centre[:, None]).unsqueeze(2)

    column = whole_column(name, mean)
    return Columns(
        column.names,
        column.active,
        column.rows,
        noisy=(0,),
        groups=len(groups),
        deviations=deviations,
    )


def _check_probes(probes: int | None) -> None:
    if probes is None:
        return
    check_whole("probes", probes, least=1)
    if probes < 2:
        raise InputError(
            "probes=1: the noise of one probe cannot be measured. Pass 16 or more, or leave it out."
        )


def _mix(seed: int, at: tuple[float, ...], probe: int) -> int:
    """The seed of one probe at one point."""
    text = f"{seed} {probe} {' '.join(number.hex() for number in at)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
