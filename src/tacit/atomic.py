"""Files that are written completely or not at all."""

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tacit.errors import InputError

PARTIAL = ".tacit-partial"
"""How the names of temporary files end; only a process that was killed leaves one behind."""


def write_atomically(
    path: str | os.PathLike[str],
    write: Callable[[Path], object],
    *,
    remedy: str,
    make_folder: bool = False,
) -> None:
    """Write a file completely or not at all: `write` fills a temporary file, which is renamed.

    A link is followed, so that it stays a link. What is not a file, such as a pipe, is written
    directly. Names of temporary files are random: two processes may write the same file.

    Args:
        path: the file.
        write: is called with the path to write to.
        remedy: what to do if it cannot be written, a sentence of the error.
        make_folder: whether the folder is made if it does not exist.
    """
    partial = None
    try:
        if _is_stream(Path(path)):
            write(Path(path))
            return
        target = Path(os.path.realpath(path))
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
        write(partial)
        partial.replace(target)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be written to ({reason}). {remedy}") from error
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink()


def remove_partials(folder: Path) -> None:
    """Delete temporary files that killed processes left in a folder where nobody writes now."""
    for path in folder.glob(f".*{PARTIAL}"):
        path.unlink(missing_ok=True)


def _is_stream(path: Path) -> bool:
    """Whether there is something that is neither a file nor a folder: a pipe or a device."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
