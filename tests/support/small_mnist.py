"""A small MNIST: files with its names and format, few images, and matching checksums."""

import gzip
import hashlib

import torch

from tacit_paper import data

NAMES = tuple(data.FILES)
COUNTS = {"train": 3, "t10k": 2}


def idx_file(name):
    """A file of MNIST's format with few images of 28×28, whose pixels count up from 0."""
    count = COUNTS[name.split("-")[0]]
    sizes = (count, 28, 28) if "images" in name else (count,)
    values = bytes(i % 251 for i in range(count * (784 if "images" in name else 1)))
    return bytes([0, 0, 8, len(sizes)]) + b"".join(s.to_bytes(4, "big") for s in sizes) + values


PLAIN = {name: idx_file(name) for name in NAMES}
"""The unzipped content of every file."""


def checksums(contents):
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def isolate(tmp_path, monkeypatch):
    """Make `data` expect these files, with no mirror, no npm and an empty cache."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(data, "FILES", checksums(PLAIN))
    monkeypatch.setattr(data, "MIRRORS", ())


def write_files(folder, contents=PLAIN, *, zipped=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content) if zipped else content)


def read_files(folder):
    """The content of every file below a folder, including hidden files, by its name."""
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_complete(mnist):
    for kind, prefix in (("train", "train"), ("test", "t10k")):
        images, labels = getattr(mnist, f"{kind}_images"), getattr(mnist, f"{kind}_labels")
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert images.shape == (COUNTS[prefix], 28, 28)
        assert bytes(images.flatten().tolist()) == PLAIN[f"{prefix}-images-idx3-ubyte"][16:]
        assert labels.tolist() == list(range(COUNTS[prefix]))


DAMAGED = {
    "short": (PLAIN[NAMES[0]][:-1], False, "has sha256"),
    "empty": (b"", False, "has sha256"),
    "not zipped": (b"nothing zipped", True, "cannot be unzipped"),
    "cut": (gzip.compress(PLAIN[NAMES[0]])[:-9], True, "cannot be unzipped"),
    "another": (gzip.compress(b"another file"), True, "has sha256"),
}
"""Damaged contents of the first file, whether its name ends in .gz, and words of the error."""
