"""Penalties with one strength per member, their values and their gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.checks import as_numbers
from tacit.ensembles.layout import Layout
from tacit.equations.rows import check_candidates
from tacit.errors import InputError
from tacit.objective.params import Params
from tacit.regularizers import Regularizer
from tacit.regularizers.family import EntrywiseFunction

Strengths = float | Sequence[float] | Tensor
"""One strength for all members, one per member, or (members, strengths) of a larger family."""


@dataclass(frozen=True, eq=False)
class WeightedEntrywise:
    """An entrywise penalty Σ_i w_i r(θ_i): evaluated directly on flat rows of parameters."""

    function: EntrywiseFunction
    weights: Tensor
    """w, (members, parameters), or (members, 1) where all entries have the same strength."""


@dataclass(frozen=True, eq=False)
class Penalties:
    """Σ_k λ_mk R_k(θ_m) of every member m, and its gradient."""

    regularizers: tuple[Regularizer, ...]
    strengths: tuple[Tensor, ...]
    """Shape (members, strengths) for each regularizer."""
    entrywise: tuple[WeightedEntrywise, ...]
    """The entrywise families; autograd differentiates the others."""

    @property
    def needs_autograd(self) -> bool:
        """Whether autograd differentiates a family.

        Such a family may raise an error on weights that are not finite, as the nuclear norm does.
        """
        return len(self.entrywise) < len(self.regularizers)

    def select(self, members: Tensor) -> "Penalties":
        """The penalties of some of the members."""
        return Penalties(
            self.regularizers,
            tuple(strengths[members] for strengths in self.strengths),
            tuple(WeightedEntrywise(e.function, e.weights[members]) for e in self.entrywise),
        )

    def autograd_values(self, params: Params) -> Tensor | float:
        """The sum of the families that autograd differentiates, one value per member."""
        pairs = zip(self.regularizers, self.strengths, strict=True)
        families = [(r, strengths) for r, strengths in pairs if r.entrywise is None]

        def member_value(params: Params, *member_strengths: Tensor) -> Tensor:
            pairs = zip(families, member_strengths, strict=True)
            return torch.stack([(s * r.value(params)).sum() for (r, _), s in pairs]).sum()

        if not families:
            return 0.0
        return vmap(member_value)(params, *(strengths for _, strengths in families))

    def add_entrywise(self, theta: Tensor, gradient: Tensor) -> Tensor | float:
        """Add the gradient of the entrywise families in place; return their sum per member."""
        total: Tensor | float = 0.0
        for penalty in self.entrywise:
            weights = penalty.weights
            gradient.addcmul_(penalty.function.derivative(theta), weights)
            values, single = penalty.function.value(theta), weights.shape[1] == 1
            total = total + (values.sum(1) * weights[:, 0] if single else (values * weights).sum(1))
        return total


def expand_penalties(
    penalties: Mapping[Regularizer, Strengths] | None,
    params: Params,
    *,
    what: str = "penalties",
    single: bool = False,
) -> Penalties:
    """Check penalties and expand their strengths to (members, strengths).

    Args:
        penalties: the strengths of each penalty.
        params: stacked parameters.
        what: the name of the argument, for messages.
        single: refuse families with several strengths.
    """
    if penalties is None or (isinstance(penalties, Mapping) and not penalties):
        return Penalties((), (), ())
    if not isinstance(penalties, Mapping):
        raise InputError(
            f"{what} is a {type(penalties).__name__}: pass a dictionary from penalty to strengths, "
            "as in {tacit.l2(): [1e-3, 1e-2]}."
        )
    check_candidates(list(penalties), None)
    like = next(iter(params.values()))
    members, first_member = len(like), {n: p[0] for n, p in params.items()}
    strengths, entrywise = [], []
    for regularizer, value in penalties.items():
        columns = regularizer.bind(first_member)
        expanded = _expand_strengths(regularizer.name, value, members, len(columns.names), like)
        if single and len(columns.names) > 1:
            raise InputError(
                f"{what}: {regularizer.name!r} has {len(columns.names)} strengths; pass penalties "
                "with one strength."
            )
        strengths.append(expanded)
        if regularizer.entrywise is not None:
            everywhere = expanded.shape[1] == 1 and columns.active.keys() == params.keys()
            by_tensor = {n: expanded[:, column] for n, (column,) in columns.active.items()}
            weights = (
                expanded if everywhere else Layout.of(params).repeat_per_entry(by_tensor, members)
            )
            entrywise.append(WeightedEntrywise(regularizer.entrywise, weights))
    return Penalties(tuple(penalties), tuple(strengths), tuple(entrywise))


def _expand_strengths(name: str, value: Any, members: int, strengths: int, like: Tensor) -> Tensor:
    tensor = as_numbers(value, like, what=f"the strength of {name!r}")
    expected = tensor.shape in ((), (members,), (members, strengths))
    if not expected or (tensor.dim() == 1 and strengths > 1) or not bool(tensor.isfinite().all()):
        raise InputError(
            f"strengths of {name!r} have shape {tuple(tensor.shape)}: pass one finite number, one "
            f"for each of the {members} members, or a tensor of shape ({members}, {strengths})."
        )
    rows = tensor.reshape(-1, strengths if tensor.dim() == 2 else 1)
    return rows.expand(members, strengths)
