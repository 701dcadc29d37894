"""Which parts of a batch are the inputs that a technique changes."""

from collections.abc import Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor

from tacit.errors import InputError, check_type
from tacit.objective.deriving import probe_of, user_reader
from tacit.objective.losses import MeanLoss
from tacit.objective.objective import Objective
from tacit.objective.params import describe, shorten

Key = str | int
"""The name of a part of a batch that is a mapping, or its position in a tuple."""


def has_target(objective: Objective) -> bool:
    """Whether batches are (inputs, …, target), read with loss(output, target)."""
    return isinstance(user_reader(objective), MeanLoss)


def find_inputs(objective: Objective, inputs: Any, technique: str) -> list[Key]:
    """The keys of the inputs that are changed: real numbers, in tensors.

    Without a choice, the only input of a batch (input, target).
    """
    batch = probe_of(objective)[0]
    keys = keys_of(batch)
    if has_target(objective):
        keys = keys[:-1]
    if inputs is None:
        if not has_target(objective) or len(keys) != 1:
            raise InputError(
                f"{technique} does not know which parts of a batch ({describe_keys(batch)}) are "
                "the inputs to change: pass inputs=, a name or position, or a list of them."
            )
        inputs = keys
    needed = "the name or position of a part of a batch, or a list of them"
    check_type("inputs", inputs, str | int | Sequence, needed)
    chosen = [inputs] if isinstance(inputs, str | int) else list(inputs)
    missing = [key for key in chosen if isinstance(key, bool) or key not in keys]
    if missing or not chosen:
        raise InputError(
            f"inputs={inputs!r} names no input of a batch: there are {shorten(map(repr, keys))}."
        )
    for key in chosen:
        part = batch[key]
        if not isinstance(part, Tensor) or not part.is_floating_point():
            raise InputError(
                f"input {key!r} is {describe(part)}: {technique} needs tensors of real numbers. "
                "Token ids and other integers have no values in between; apply the technique to "
                "their embeddings: make the objective of a model that takes these, or use augment "
                "with a function of your own."
            )
    return chosen


def keys_of(batch: Any) -> list[Key]:
    """The names or positions of the parts of a batch."""
    if isinstance(batch, Mapping):
        return list(batch)
    return list(range(len(batch))) if isinstance(batch, list | tuple) else []


def describe_keys(batch: Any) -> str:
    """The parts of a batch, for messages."""
    keys = keys_of(batch)
    return shorten(f"{key!r}: {describe(batch[key])}" for key in keys) or type(batch).__name__


def replace_parts(batch: Any, parts: Mapping[Key, Any]) -> Any:
    """A copy of a batch, of the same type, with other values of some parts."""
    if isinstance(batch, Mapping):
        changed = copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        for key, value in parts.items():
            changed[key] = value
        return changed
    values = [parts.get(position, value) for position, value in enumerate(batch)]
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
