"""Equations and targets on disk: safetensors files, written whole or not at all, checked when read.

A file has a head of plain values (JSON) and numbered tensors. A checksum shows damage. A file
with the right checksum may still be anybody's, so its head is checked against the types that it is
read into, and a small file never needs much memory.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tacit.atomic import write_atomically
from tacit.errors import InputError, check_type
from tacit.plain import check_plain, parse_json

EQUATIONS, TARGET = "tacit equations 5", "tacit target 2"
"""The formats: a file of another version is refused."""
MAX_LIST = 95_000_000
"""Bytes of the head and the list of matrices: safetensors reads no file with more than 100 MB."""


def write_file(
    path: str | os.PathLike[str], header: dict[str, Any], tensors: Sequence[Tensor], form: str
) -> None:
    """Write plain values and tensors to a file of this format."""
    from safetensors.torch import save

    check_type("path", path, (str, os.PathLike), "the path of a file")
    head = json.dumps(header)
    if len(json.dumps(head)) + 100 * len(tensors) > MAX_LIST:
        raise InputError(
            f"{path} would hold {len(tensors):,} tensors, more than one file can list. Save fewer "
            "steps or endpoints in each file, and stack them after loading."
        )
    # clones, because safetensors refuses what shares memory, as equations stacked on themselves do
    numbered = {str(i): t.detach().cpu().clone().contiguous() for i, t in enumerate(tensors)}
    metadata = {"format": form, "head": head, "sha256": _checksum(head, [*numbered.values()])}
    content = save(numbered, metadata=metadata)
    remedy = "Pass the path of a file, in a folder that exists and has space."
    write_atomically(path, lambda partial: partial.write_bytes(content), remedy=remedy)


def read_file(path: str | os.PathLike[str], form: str) -> tuple[dict[str, Any], list[Tensor]]:
    """The plain values and the tensors of a file that `write_file` wrote in this format.

    A ValueError says how an undamaged file differs from that.
    """
    metadata, tensors = _open_file(path, form)
    if sorted(metadata) != ["format", "head", "sha256"]:
        raise ValueError(f"its metadata are {', '.join(sorted(metadata))[:80]!r}")
    if _checksum(metadata["head"], tensors) != metadata["sha256"]:
        raise ValueError("its checksum is wrong")
    return check_plain(dict[str, Any], parse_json(metadata["head"]), "the head"), tensors


def _open_file(path: str | os.PathLike[str], form: str) -> tuple[dict[str, str], list[Tensor]]:
    """The metadata and the tensors of a file of this format."""
    from safetensors import SafetensorError, safe_open

    check_type("path", path, (str, os.PathLike), "the path of a file")
    try:
        if not Path(path).is_file():
            raise OSError("it is not a file")
        with safe_open(path, framework="pt") as file:
            metadata, keys = file.metadata() or {}, list(file.keys())
            if metadata.get("format") != form:
                raise InputError(
                    f"{path} was not written by {_writer(form)} of this version: its format is "
                    f"{metadata.get('format', '')[:40]!r}, not {form!r}. "
                    f"Write the {_content(form)} again."
                )
            if {*keys} != {*map(str, range(len(keys)))}:
                raise ValueError("its tensors are not numbered")
            return metadata, [file.get_tensor(str(i)) for i in range(len(keys))]
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} holds no {_content(form)}: {error}. Pass a file that {_writer(form)} wrote."
        ) from error


def format_of(path: str | os.PathLike[str]) -> str:
    """The format of a file, or "" if it has none of these."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("format", "")
    except (OSError, SafetensorError):
        return ""


def _content(form: str) -> str:
    return "equations" if form == EQUATIONS else "target"


def _writer(form: str) -> str:
    return f"{_content(form).capitalize()}.save"


def _checksum(head: str, tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256(head.encode())
    for tensor in tensors:
        dtype = "" if tensor.dtype == torch.float64 else str(tensor.dtype)
        digest.update(f" {tuple(tensor.shape)} {dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
