"""Equations on disk: safetensors files, written completely or not at all, and checked when read.

A file has a head of plain values (JSON), one matrix per block, and one for the noise of each block
that has any. A checksum shows damage. A file with the right checksum may still be anybody's, so its
head is checked against the types that it is read into, and a small file never needs much memory.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tacit.atomic import write_atomically
from tacit.errors import InputError, check_type
from tacit.plain import check_plain, parse_json

FORMAT = "tacit equations 4"
MAX_LIST = 95_000_000
"""Bytes of the head and the list of matrices: safetensors reads no file with more than 100 MB."""


def write_file(path: str | os.PathLike[str], header: dict[str, Any], factors: list[Tensor]) -> None:
    """Write plain values and factors to a file."""
    from safetensors.torch import save

    check_type("path", path, (str, os.PathLike), "the path of a file")
    head = json.dumps(header)
    if len(json.dumps(head)) + 100 * len(factors) > MAX_LIST:
        raise InputError(
            f"{path} would hold {len(factors):,} blocks, more than one file can list. Save fewer "
            "steps or endpoints in each file, and stack them after loading."
        )
    # clones, because safetensors refuses what shares memory, as equations stacked on themselves do
    tensors = {str(i): factor.clone().contiguous() for i, factor in enumerate(factors)}
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
        raise ValueError(f"its metadata are {', '.join(sorted(metadata))[:80]!r}")
    if _checksum(metadata["head"], factors) != metadata["sha256"]:
        raise ValueError("its checksum is wrong")
    return check_plain(dict[str, Any], parse_json(metadata["head"]), "the head"), factors


def _open_file(path: str | os.PathLike[str]) -> tuple[dict[str, str], list[Tensor]]:
    """The metadata and the matrices of a file of this format."""
    from safetensors import SafetensorError, safe_open

    check_type("path", path, (str, os.PathLike), "the path of a file")
    try:
        if not Path(path).is_file():
            raise OSError("it is not a file")
        with safe_open(path, framework="pt") as file:
            metadata, keys = file.metadata() or {}, list(file.keys())
            if metadata.get("format") != FORMAT:
                raise InputError(
                    f"{path} was not written by Equations.save of this version: its format is "
                    f"{metadata.get('format', '')[:40]!r}, not {FORMAT!r}. "
                    "Write the equations again."
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


def _checksum(head: str, factors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256(head.encode())
    for factor in factors:
        digest.update(f" {tuple(factor.shape)} ".encode())
        digest.update(factor.contiguous().numpy().data)
    return digest.hexdigest()
