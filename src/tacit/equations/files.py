"""Equations on disk: safetensors files, written completely or not at all, and checked when read.

A file has a head of plain values (JSON) and one matrix per block. A checksum shows damage. A file
with the right checksum may still be anybody's, so its head is checked against the types that it is
read into, and a small file never needs much memory.
"""

import hashlib
import json
import os
import re
import sys
import types
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from tacit.atomic import write_atomically
from tacit.errors import InputError

FORMAT = "tacit equations 3"
MAX_COUNT = 2**53
"""Counts are at most this: up to here float64 holds every whole number."""
MAX_FLOAT = sys.float_info.max
MAX_LIST = 95_000_000
"""Bytes of the head and the list of matrices: safetensors reads no file with more than 100 MB."""


def write_file(path: str | os.PathLike[str], header: dict[str, Any], factors: list[Tensor]) -> None:
    """Write plain values and factors to a file."""
    from safetensors.torch import save

    head = json.dumps(header)
    if len(json.dumps(head)) + 100 * len(factors) > MAX_LIST:
        raise InputError(
            f"{path} would hold {len(factors):,} blocks, more than one file can list. Save fewer "
            "steps or endpoints in each file, and stack them after loading."
        )
    tensors = {str(i): factor.contiguous() for i, factor in enumerate(factors)}
    metadata = {"format": FORMAT, "head": head, "sha256": _checksum(head, factors)}
    content = save(tensors, metadata=metadata)
    remedy = "Pass the path of a file, in a folder that exists and has space."
    write_atomically(path, lambda partial: partial.write_bytes(content), remedy=remedy)


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[Tensor]]:
    """The plain values and the factors of a file that `write_file` wrote.

    A ValueError says how an undamaged file differs from that.
    """
    metadata, factors = _open_file(path)
    if sorted(metadata) != ["format", "head", "sha256"]:
        raise ValueError(f"its metadata are {', '.join(sorted(metadata))}")
    if _checksum(metadata["head"], factors) != metadata["sha256"]:
        raise ValueError("its checksum is wrong")
    try:
        return check_plain(dict[str, Any], json.loads(metadata["head"]), "the head"), factors
    except RecursionError as error:
        raise ValueError("its head is nested too deeply") from error


def _open_file(path: str | os.PathLike[str]) -> tuple[dict[str, str], list[Tensor]]:
    """The metadata and the matrices of a file of this format."""
    from safetensors import SafetensorError, safe_open

    try:
        if not Path(path).is_file():
            raise OSError("it is not a file")
        with safe_open(path, framework="pt") as file:
            metadata, keys = file.metadata() or {}, list(file.keys())
            if metadata.get("format") != FORMAT:
                raise InputError(
                    f"{path} was not written by Equations.save of this version: its format is "
                    f"{metadata.get('format')!r}, not {FORMAT!r}. Write the equations again."
                )
            if {*keys} != {*map(str, range(len(keys)))}:
                raise ValueError("its matrices are not numbered")
            if any(file.get_slice(key).get_dtype() != "F64" for key in keys):
                raise ValueError("its matrices are not in float64")
            return metadata, [file.get_tensor(str(i)) for i in range(len(keys))]
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} holds no equations: {error}. Pass a file that Equations.save wrote."
        ) from error


def check_plain(kind: Any, value: Any, where: str) -> Any:
    """A value from JSON as this type; a ValueError says where it is something else.

    Whole numbers are counts, 0 to `MAX_COUNT`, and other numbers are finite. Lists become tuples,
    and objects become dataclasses: every field without a default, and no other.
    """
    container, parts = get_origin(kind), get_args(kind)
    if container in (Union, types.UnionType):  # of one type with None
        return None if value is None else check_plain(parts[0], value, where)
    if container is dict and isinstance(value, dict):
        return {k: check_plain(parts[1], v, f"{k!r} of {where}") for k, v in value.items()}
    if container is tuple and isinstance(value, list):
        return tuple(
            check_plain(parts[0], v, f"number {i} of {where}") for i, v in enumerate(value)
        )
    if is_dataclass(kind) and isinstance(value, dict):
        return _check_fields(kind, value, where)
    if container is not None or not _is_plain(kind, value):
        raise ValueError(f"{where} is {str(value)[:40]!r}")
    return value


def _check_fields(kind: Any, value: dict[str, Any], where: str) -> Any:
    """A dataclass from the values of its fields."""
    kinds = get_type_hints(kind)
    required = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
    if wrong := ({*value} - {*kinds}) | (required - {*value}):
        raise ValueError(f"{where} has missing or unknown parts: {', '.join(sorted(wrong))[:80]}")
    return kind(**{k: check_plain(kinds[k], v, f"{k} of {where}") for k, v in value.items()})


def _is_plain(kind: Any, value: Any) -> bool:
    """Whether a value without parts is of this type."""
    if kind is int:
        return type(value) is int and 0 <= value <= MAX_COUNT
    if kind is float:
        return type(value) in (int, float) and -MAX_FLOAT <= value <= MAX_FLOAT
    if kind is str:  # JSON can spell half characters, which cannot be printed
        return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)
    return kind is Any or isinstance(value, kind)


def _checksum(head: str, factors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256(head.encode())
    for factor in factors:
        digest.update(f" {tuple(factor.shape)} ".encode())
        digest.update(factor.contiguous().numpy().data)
    return digest.hexdigest()
