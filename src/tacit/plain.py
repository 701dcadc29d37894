"""Plain values from JSON that anybody may have written, checked against the types they become."""

import json
import re
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

MAX_COUNT = 2**53
"""Counts are at most this: up to here float64 holds every whole number."""
MAX_FLOAT = 1e150
"""Other numbers are at most this, so that their squares are finite."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; a ValueError says why there is none."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"it has a key twice, one of {', '.join(value)[:80]!r}")
    return value


def check_plain(kind: Any, value: Any, where: str) -> Any:
    """A value from JSON as this type; a ValueError says where it is something else.

    Whole numbers are counts, 0 to `MAX_COUNT`, and other numbers are at most `MAX_FLOAT`. Lists
    become tuples, and objects become dataclasses: every field without a default, and no other.
    """
    container, parts = get_origin(kind), get_args(kind)
    if container in (Union, types.UnionType):  # of one type with None
        return None if value is None else check_plain(parts[0], value, where)
    if container is dict and isinstance(value, dict):
        return {k: check_plain(parts[1], v, f"{k[:40]!r} of {where}") for k, v in value.items()}
    if container is tuple and isinstance(value, list):
        return tuple(
            check_plain(parts[0], v, f"number {i} of {where}") for i, v in enumerate(value)
        )
    if is_dataclass(kind) and isinstance(value, dict):
        return _check_fields(kind, value, where)
    if container is not None or not _is_plain(kind, value):
        raise ValueError(f"{where} is {str(value)[:40]!r}")
    return float(value) if kind is float else value


def _check_fields(kind: Any, value: dict[str, Any], where: str) -> Any:
    """A dataclass from the values of its fields."""
    kinds, required = _field_types(kind)
    if wrong := (value.keys() - kinds.keys()) | (required - value.keys()):
        raise ValueError(f"{where} has missing or unknown parts: {', '.join(sorted(wrong))[:80]!r}")
    return kind(**{k: check_plain(kinds[k], v, f"{k} of {where}") for k, v in value.items()})


@cache
def _field_types(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """The types of a dataclass's fields, and the names of those without a default."""
    required = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
    return get_type_hints(kind), required


def _is_plain(kind: Any, value: Any) -> bool:
    """Whether a value without parts is of this type."""
    if kind is int:
        return type(value) is int and 0 <= value <= MAX_COUNT
    if kind is float:
        return type(value) in (int, float) and -MAX_FLOAT <= value <= MAX_FLOAT
    if kind is str:  # JSON can spell half characters, which cannot be printed
        return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)
    return kind is Any or isinstance(value, kind)
