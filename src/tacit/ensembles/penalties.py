"""Penalties with one strength per member, their values and their gradients."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from tacit.ensembles.checks import as_numbers
from tacit.ensembles.members import Ensemble
from tacit.equations.candidates import check_candidates
from tacit.errors import InputError, check_type
from tacit.objective.params import Params
from tacit.regularizers import Regularizer
from tacit.regularizers.family import EntrywiseFunction

Strengths = float | Sequence[float] | Tensor
"""One strength for all members, one per member, or (members, strengths) of a larger family."""


class Penalties(NamedTuple):
    """Σ_k λ_mk R_k(θ_m) of every member m, and its gradient."""

    differentiated: list[tuple[Regularizer, Tensor]]
    """Families that autograd differentiates, with their strengths (members, strengths).

    They may raise an error on weights that are not finite, as the nuclear norm does."""
    entrywise: list[tuple[EntrywiseFunction, Tensor]]
    """Families Σ_i w_i r(θ_i), evaluated on flat rows of parameters: r, and the weights w of shape
    (members, parameters), or (members, 1) where all entries have the same strength."""

    def select(self, members: Tensor) -> "Penalties":
        """The penalties of some of the members."""
        return Penalties(
            [(family, strengths[members]) for family, strengths in self.differentiated],
            [(function, weights[members]) for function, weights in self.entrywise],
        )

    def autograd_values(self, params: Params) -> Tensor | float:
        """The sum of the families that autograd differentiates, one value per member."""
        if not self.differentiated:
            return 0.0
        families, strengths = zip(*self.differentiated, strict=True)

        def member_value(params: Params, *member_strengths: Tensor) -> Tensor:
            pairs = zip(families, member_strengths, strict=True)
            return torch.stack([(s * r.value(params)).sum() for r, s in pairs]).sum()

        return vmap(member_value)(params, *strengths)

    def add_entrywise(self, theta: Tensor, gradient: Tensor) -> Tensor | float:
        """Add the gradient of the entrywise families in place; return their sum per member."""
        total: Tensor | float = 0.0
        for function, weights in self.entrywise:
            gradient.addcmul_(function.derivative(theta), weights)
            values, single = function.value(theta), weights.shape[1] == 1
            total = total + (values.sum(1) * weights[:, 0] if single else (values * weights).sum(1))
        return total


def check_penalties(what: str, penalties: Any) -> Mapping[Regularizer, Strengths]:
    """Check that an argument is a dictionary from penalties to strengths, or None."""
    needed = "a dictionary from penalty to strengths, as in {tacit.l2(): [1e-3, 1e-2]}"
    check_type(what, penalties, Mapping | None, needed)
    if penalties:
        check_candidates(list(penalties), None)
    return penalties or {}


def expand_penalties(
    penalties: Mapping[Regularizer, Strengths] | None, ensemble: Ensemble
) -> Penalties:
    """Check penalties, and expand their strengths to all members."""
    differentiated, entrywise = [], []
    for regularizer, value in check_penalties("penalties", penalties).items():
        columns = regularizer.bind(ensemble.member(0))
        strengths = expand_strengths(regularizer.name, value, len(columns.names), ensemble)
        if regularizer.entrywise is None:
            differentiated.append((regularizer, strengths))
            continue
        everywhere = columns.active.keys() == ensemble.params.keys()
        if not everywhere or strengths.shape[1] > 1:
            # Each tensor has one strength, or none outside the scope: repeat it for all entries.
            weights = {}
            for name, p in ensemble.params.items():
                active = list(columns.active.get(name, ()))
                weights[name] = strengths[:, active].sum(1, keepdim=True).expand(-1, p[0].numel())
            strengths = ensemble.flatten(weights)
        entrywise.append((regularizer.entrywise, strengths))
    return Penalties(differentiated, entrywise)


def expand_strengths(name: str, value: Any, strengths: int, ensemble: Ensemble) -> Tensor:
    """Check the strengths of a penalty, and expand them to (members, strengths)."""
    members = len(ensemble)
    tensor = as_numbers(value, ensemble, what=f"the strength of {name!r}")
    expected = tensor.shape in ((), (members,), (members, strengths))
    if not expected or (tensor.dim() == 1 and strengths > 1) or not bool(tensor.isfinite().all()):
        raise InputError(
            f"strengths of {name!r} have shape {tuple(tensor.shape)}: pass one finite number, one "
            f"for each of the {members} members, or a tensor of shape ({members}, {strengths})."
        )
    return tensor.reshape(-1, strengths if tensor.dim() == 2 else 1).expand(members, strengths)
