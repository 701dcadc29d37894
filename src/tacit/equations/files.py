"""Equations on disk: safetensors files, written completely or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from tacit.errors import InputError

FORMAT = "tacit equations 2"


def write_file(path: str | os.PathLike[str], header: dict[str, Any], factors: list[Tensor]) -> None:
    """Write plain values and factors to a file."""
    from safetensors.torch import save

    path = Path(path)
    tensors = {str(i): factor.contiguous() for i, factor in enumerate(factors)}
    content = save(tensors, metadata={"format": FORMAT, "head": json.dumps(header)})
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(
            f"equations cannot be written to {path}: {error}. Pass a path in a folder that exists."
        ) from error


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[Tensor]]:
    """The plain values and the factors of a file that `write_file` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 # not a mapping
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} holds no equations: {error}. Pass a file that Equations.save wrote."
        ) from error
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"{path} was not written by Equations.save: its format is "
            f"{metadata.get('format')!r}, not {FORMAT!r}. Write the equations again."
        )
    return json.loads(metadata["head"]), [tensors[str(i)] for i in range(len(tensors))]
