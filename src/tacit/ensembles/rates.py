"""Dropout rates of the members."""

from collections.abc import Sequence

from torch import Tensor

from tacit.ensembles.checks import numbers
from tacit.errors import InputError


def own_rates(dropout: float | Sequence[float] | Tensor, members: int, like: Tensor) -> Tensor:
    """One rate a member, checked."""
    given = numbers(dropout, like, what="dropout")
    if given.shape not in ((), (members,)) or not bool(((given >= 0) & (given < 1)).all()):
        raise InputError(
            f"dropout is {dropout!r}: pass a rate from 0 to below 1, or one for each of the "
            f"{members} members."
        )
    return given.expand(members)
