"""Where a command writes: results to the output, JSON, CSV or a page; all else to the errors."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from tacit.atomic import write_atomically
from tacit.errors import InputError

PRINTED = Path("/dev/stdout")
"""The output, which a path of - stands for."""


class Outputs(NamedTuple):
    """What was asked for."""

    as_json: bool
    html: Path | None
    csv: Path | None


def check_outputs(*, as_json: bool, html: Path | None, csv: Path | None) -> Outputs:
    """The outputs with absolute paths, because the user's code may change the folder.

    Refused before anything is computed: folders, and two results on one output.
    """
    html, csv = (PRINTED if path == Path("-") else path for path in (html, csv))
    files = {option: path for option, path in (("--html", html), ("--csv", csv)) if path}
    for option, path in files.items():
        if path.is_dir():
            raise InputError(
                f"{option} {path} cannot be written to: it is a folder. Choose a file."
            )
        parent = path.absolute().parent
        if not parent.is_dir():
            raise InputError(
                f"{option} {path} cannot be written to: there is no folder {parent}. Make it first."
            )
    streams = [stream for path in files.values() if (stream := find_stream(path))]
    taken = [sys.stdout] * as_json + streams
    if len({*map(id, taken)}) < len(taken) or (html and csv and html.resolve() == csv.resolve()):
        raise InputError("two results would go to the same place: pass another file for one.")
    return Outputs(as_json, html and html.absolute(), csv and csv.absolute())


def only_results() -> AbstractContextManager[TextIO]:
    """What the user's code prints meanwhile goes to the errors, not between the results."""
    return redirect_stdout(sys.stderr)


def print_result(outputs: Outputs, text: str, content: Mapping[str, Any]) -> None:
    """JSON, if that was asked for, else the text; the text to the errors where a file is stdout."""
    if outputs.as_json:
        print(json.dumps(content, indent=2))
        return
    files = [path for path in (outputs.html, outputs.csv) if path is not None]
    taken = any(find_stream(path) is sys.stdout for path in files)
    print(text, file=sys.stderr if taken else sys.stdout)


def write_text(path: Path, text: str) -> None:
    """Write to a stream, or write a file completely or not at all."""
    stream = find_stream(path)
    if stream is not None:
        print(text, end="", file=stream)
        return
    content = text.encode(errors="backslashreplace")
    remedy = "Choose another file."
    write_atomically(path, lambda partial: partial.write_bytes(content), remedy=remedy)


def find_stream(path: Path) -> TextIO | None:
    """The output or the errors, if the path is one of them: /dev/stdout, also if that is a file."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or no file
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return stream
    return None
