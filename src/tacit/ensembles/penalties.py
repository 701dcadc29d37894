"""Penalties of all members, each with its own strengths, as one differentiable function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from tacit.assembly import check_candidates
from tacit.errors import InputError
from tacit.params import Params
from tacit.regularizers import Regularizer

Strengths = float | Sequence[float] | Tensor
"""One strength for all members, one each, or (members, coefficients) of a larger family."""


@dataclass(frozen=True, eq=False)
class Penalties:
    """Σ_k λ_mk R_k(θ_m) of every member m."""

    regularizers: tuple[Regularizer, ...]
    strengths: tuple[Tensor, ...]
    """(members, coefficients) of each regularizer."""

    def of(self, members: Tensor) -> "Penalties":
        """Those of some of the members."""
        return Penalties(self.regularizers, tuple(s[members] for s in self.strengths))

    def value(self, params: Params) -> Tensor | float:
        """One value a member; 0 where there is no penalty at all."""
        return self._mapped(params, *self.strengths) if self.regularizers else 0.0

    @property
    def _mapped(self) -> Callable[..., Tensor]:
        def one(params: Params, *strengths: Tensor) -> Tensor:
            pairs = zip(self.regularizers, strengths, strict=True)
            return torch.stack([(own * r.value(params)).sum() for r, own in pairs]).sum()

        return vmap(one)


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
    if not given:
        return Penalties((), ())
    if not isinstance(given, Mapping):
        raise InputError(
            f"{what} is a {type(given).__name__}: pass a dictionary from penalty to strengths, as "
            "in {tacit.l2(): [1e-3, 1e-2]}."
        )
    check_candidates(list(given), None)
    first = next(iter(params.values()))
    one = {n: p[0] for n, p in params.items()}
    strengths = [
        _spread(r.name, value, len(first), len(r.bind(one).names), first)
        for r, value in given.items()
    ]
    for regularizer, own in zip(given, strengths, strict=True):
        if single and own.shape[1] > 1:
            raise InputError(
                f"{what}: {regularizer.name!r} has {own.shape[1]} coefficients; pass penalties of "
                "one strength."
            )
    return Penalties(tuple(given), tuple(strengths))


def _spread(name: str, value: Any, members: int, coefficients: int, like: Tensor) -> Tensor:
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    fits = tensor.shape in ((), (members,), (members, coefficients))
    if not fits or (tensor.dim() == 1 and coefficients > 1) or not bool(tensor.isfinite().all()):
        raise InputError(
            f"strengths of {name!r} have shape {tuple(tensor.shape)}: pass one finite number, one "
            f"for each of the {members} members, or ({members}, {coefficients}) of them."
        )
    return tensor.reshape(-1, coefficients if tensor.dim() == 2 else 1).expand(
        members, coefficients
    )
