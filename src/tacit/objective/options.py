"""The options that all constructors of an `Objective` share."""

from typing import Literal, TypedDict

import torch
from torch import Tensor

from tacit.errors import InputError, check_choice
from tacit.objective.models import BatchNorm

Accumulate = Literal["float64", "float32"]
SUMS: dict[Accumulate, torch.dtype] = {"float64": torch.float64, "float32": torch.float32}
"""The dtypes that derivatives can be summed in."""


class ObjectiveOptions(TypedDict, total=False):
    """The options of an `Objective`, which describes them."""

    weights: Tensor | None
    batch_size: int
    training: bool
    draws: int
    seed: int
    batch_norm: BatchNorm | None
    accumulate: Accumulate


def check_options(constructor: str, options: ObjectiveOptions) -> ObjectiveOptions:
    """Refuse options that no objective has."""
    for name in options:
        check_choice(f"an option of {constructor}", name, ObjectiveOptions.__annotations__)
    return options


def check_draws(draws: int, *, fixed: bool) -> None:
    """Refuse several draws of what does not change between them."""
    if draws > 1 and fixed:
        raise InputError(
            f"draws={draws}, but every pass over the data has the same batches: pass tensors with "
            "batch_size=, or a DataLoader with shuffle=True, whose examples a draw can regroup; or "
            "draws=1."
        )
