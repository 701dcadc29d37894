"""Dropout rates of the members."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.errors import InputError


def own_rates(dropout: float | Sequence[float] | Tensor, members: int, like: Tensor) -> Tensor:
    """One rate a member, checked."""
    given = torch.as_tensor(dropout, dtype=like.dtype, device=like.device)
    if given.shape not in ((), (members,)) or not bool(((given >= 0) & (given < 1)).all()):
        raise InputError(
            f"dropout is {dropout!r}: pass a rate from 0 to below 1, or one for each of the "
            f"{members} members."
        )
    return given.expand(members)
