"""Penalties of all members, each with its own strengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.checks import numbers
from tacit.ensembles.layout import Layout
from tacit.equations.rows import check_candidates
from tacit.errors import InputError
from tacit.objective.params import Params
from tacit.regularizers import Regularizer
from tacit.regularizers.family import Entry

Strengths = float | Sequence[float] | Tensor
"""One strength for all members, one each, or (members, coefficients) of a larger family."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """A family that treats each entry alone: it acts on rows of parameters as they are."""

    entry: Entry
    weights: Tensor
    """The strength at every entry, (members, parameters), or (members, 1) where it is one."""


@dataclass(frozen=True, eq=False)
class Penalties:
    """Σ_k λ_mk R_k(θ_m) of every member m, and its gradient."""

    regularizers: tuple[Regularizer, ...]
    strengths: tuple[Tensor, ...]
    """(members, coefficients) of each regularizer."""
    entries: tuple[Weighted, ...]
    """Those whose gradient is written down; the rest is left to autograd."""

    @property
    def fragile(self) -> bool:
        """Whether a family may fail on a member that is not finite, as a singular value does."""
        return len(self.entries) < len(self.regularizers)

    def of(self, members: Tensor) -> "Penalties":
        """Those of some of the members."""
        return Penalties(
            self.regularizers,
            tuple(own[members] for own in self.strengths),
            tuple(Weighted(own.entry, own.weights[members]) for own in self.entries),
        )

    def traced(self, params: Params) -> Tensor | float:
        """One value a member of the families that autograd must differentiate."""
        pairs = zip(self.regularizers, self.strengths, strict=True)
        chosen = [(r, own) for r, own in pairs if r.entry is None]

        def one(params: Params, *strengths: Tensor) -> Tensor:
            pairs = zip(chosen, strengths, strict=True)
            return torch.stack([(own * r.value(params)).sum() for (r, _), own in pairs]).sum()

        return vmap(one)(params, *(own for _, own in chosen)) if chosen else 0.0

    def add(self, theta: Tensor, slope: Tensor) -> Tensor | float:
        """Add the gradient of the other families to `slope` in place; their values by member."""
        total: Tensor | float = 0.0
        for own in self.entries:
            slope.addcmul_(own.entry.slope(theta), own.weights)
            values, single = own.entry.value(theta), own.weights.shape[1] == 1
            total = total + (
                values.sum(1) * own.weights[:, 0] if single else (values * own.weights).sum(1)
            )
        return total


def own_penalties(
    given: Mapping[Regularizer, Strengths] | None,
    params: Params,
    *,
    what: str = "penalties",
    single: bool = False,
) -> Penalties:
    """Penalties checked against the members, their strengths spread to (members, coefficients).

    With `single`, families of several coefficients are refused.
    """
    if given is None or (isinstance(given, Mapping) and not given):
        return Penalties((), (), ())
    if not isinstance(given, Mapping):
        raise InputError(
            f"{what} is a {type(given).__name__}: pass a dictionary from penalty to strengths, as "
            "in {tacit.l2(): [1e-3, 1e-2]}."
        )
    check_candidates(list(given), None)
    first = next(iter(params.values()))
    one = {n: p[0] for n, p in params.items()}
    strengths, entries = [], []
    for regularizer, value in given.items():
        columns = regularizer.bind(one)
        own = _spread(regularizer.name, value, len(first), len(columns.names), first)
        if single and len(columns.names) > 1:
            raise InputError(
                f"{what}: {regularizer.name!r} has {len(columns.names)} coefficients; pass "
                "penalties of one strength."
            )
        strengths.append(own)
        if regularizer.entry is not None:
            everywhere = own.shape[1] == 1 and columns.active.keys() == params.keys()
            placed = {n: own[:, column] for n, (column,) in columns.active.items()}
            weights = own if everywhere else Layout.of(params).spread(placed, len(first))
            entries.append(Weighted(regularizer.entry, weights))
    return Penalties(tuple(given), tuple(strengths), tuple(entries))


def _spread(name: str, value: Any, members: int, coefficients: int, like: Tensor) -> Tensor:
    tensor = numbers(value, like, what=f"the strength of {name!r}")
    fits = tensor.shape in ((), (members,), (members, coefficients))
    if not fits or (tensor.dim() == 1 and coefficients > 1) or not bool(tensor.isfinite().all()):
        raise InputError(
            f"strengths of {name!r} have shape {tuple(tensor.shape)}: pass one finite number, one "
            f"for each of the {members} members, or ({members}, {coefficients}) of them."
        )
    wide = tensor.reshape(-1, coefficients if tensor.dim() == 2 else 1)
    return wide.expand(members, coefficients)
