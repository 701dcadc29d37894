"""Rows on disk: written unit by unit, each file complete or absent, configurations never mixed.

A result folder contains `run.json` (the metadata: configuration, versions, hashes), `rows.parquet`
and the figure. During a run, finished units are in `parts/`, from where the next run resumes. One
process at a time writes to a folder. What is read is checked against its hashes.
"""

import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tacit
from tacit.atomic import remove_partials, write_atomically
from tacit.errors import InputError
from tacit.plain import check_plain, parse_json
from tacit_paper import Experiment, Row, Table, Work

if TYPE_CHECKING:
    import pyarrow as pa

try:
    import fcntl
except ImportError:  # Windows: folders are not locked there
    fcntl = None

CHOOSE_OUT = "Choose another --out, or make space there."
"""What to do if a result cannot be written."""
VERSIONS = ("tacit", "torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "scikit-learn")
"""Packages whose versions are written to the metadata."""
MAX_METADATA = 2**20
"""Bytes of a `run.json`, at most."""
MAX_VALUES = 10**8
"""Values of a table of rows, at most: a small compressed file could fill the memory."""
MAX_BYTES = 2**30
"""Bytes of a table of rows, at most, in the file and in memory."""
MEASURED = ("_seconds", "_bytes")
"""Endings of columns with measured times and memory, which differ between runs."""
_REMEDY = "Move it away, or pass --force to replace it."
_SETTINGS = ("experiment", "preset", "config", "device", "made_with")


@dataclass(frozen=True)
class _Metadata:
    """What is in a `run.json`: the settings from the start, the rest once the run is complete."""

    experiment: str
    preset: str
    config: dict[str, Any]
    device: str
    made_with: dict[str, str]
    config_hash: str
    complete: bool = False
    rows: int = -1
    rows_sha256: str = ""
    content_hash: str = ""
    versions: dict[str, str] | None = None
    platform: str = ""
    metadata_sha256: str = ""
    note: Any = None
    """Written by hand."""


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, its metadata and its rows."""

    folder: Path
    metadata: dict[str, Any]
    rows: Table
    reused: int
    """Number of rows that an earlier run had computed."""


def run_experiment(
    name: str,
    experiment: Experiment,
    preset: str,
    folder: Path,
    *,
    device: str = "cpu",
    force: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Compute the units of an experiment that the folder lacks, and read all rows.

    Args:
        name: the experiment's name.
        experiment: its module.
        preset: `quick` or `paper`.
        folder: the result folder. Rows there with another configuration, device or version of tacit
            or torch are moved to a folder `earlier-…` inside it.
        device: the device of the tensors.
        force: delete earlier rows and start again.
        advance: is called with the number of finished units and the number of all units.
    """
    metadata = settings_of(name, experiment, preset, device)
    if _prepare(folder, metadata, force=force):
        return read_result(folder)
    work = experiment.work(getattr(experiment, preset.upper()), device)
    parts = _read_parts(folder, metadata["config_hash"])
    reused = sum(len(part) for part in parts.values())
    advance(len(parts), len(work))
    for index, unit in enumerate(work):
        if unit not in parts:
            rows = _make_rows(name, work, unit)
            parts[unit] = _write_part(folder, index, rows, metadata["config_hash"])
            advance(len(parts), len(work))
    _join_parts(folder, [parts[unit] for unit in work], metadata)
    return replace(read_result(folder), reused=reused)


def run_units(
    name: str,
    experiment: Experiment,
    preset: str,
    folder: Path,
    units: slice,
    *,
    device: str = "cpu",
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, int]:
    """Compute some units of an experiment, for `run_experiment` to join with the others.

    Unlike there the folder is locked here, and only while it is written to: several processes
    compute units of one folder at once.

    Returns:
        The number of units in the slice, and the number of all units.
    """
    metadata = settings_of(name, experiment, preset, device)
    work = experiment.work(getattr(experiment, preset.upper()), device)
    chosen = dict(list(enumerate(work))[units])
    if not chosen:
        raise InputError(
            f"units from {units.start} of {name} were asked for, and at the preset {preset!r} it "
            f"has {len(work)}: their numbers are 0 to {len(work) - 1}."
        )
    with locked(folder):
        if _prepare(folder, metadata, force=False):
            return len(chosen), len(work)
        finished = set(_read_parts(folder, metadata["config_hash"]))
    missing = {index: unit for index, unit in chosen.items() if unit not in finished}
    advance(len(chosen) - len(missing), len(chosen))
    for count, (index, unit) in enumerate(missing.items(), 1):
        rows = _make_rows(name, work, unit)
        with locked(folder):
            present = read_metadata(folder)
            if present["config_hash"] != metadata["config_hash"]:
                raise InputError(
                    f"{folder} was taken by a run with other settings while unit {index} of {name} "
                    "was computed. Give every preset, device and version its own --out."
                )
            if not present.get("complete"):
                _write_part(folder, index, rows, metadata["config_hash"])
        advance(len(chosen) - len(missing) + count, len(chosen))
    return len(chosen), len(work)


def settings_of(name: str, experiment: Experiment, preset: str, device: str) -> dict[str, Any]:
    """The metadata that a run begins with. Its `config_hash` tells runs apart that may not mix."""
    config = getattr(experiment, preset.upper())
    metadata: dict[str, Any] = {"experiment": name, "preset": preset, "config": asdict(config)}
    metadata |= {"device": device, "made_with": {n: _version(n) for n in ("tacit", "torch")}}
    return metadata | {"config_hash": _config_hash(metadata)}


def _make_rows(name: str, work: Work, unit: str) -> list[Row]:
    rows = [{"unit": unit, **row} for row in work[unit]()]
    if not rows:
        raise RuntimeError(f"no rows for the unit {unit!r} of {name}: yield at least one.")
    return rows


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only process that works in a folder, which is made; wait for one that does now.

    The lock is on the folder itself: it leaves no file, and ends with the process.
    """
    descriptor = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if fcntl is not None:
            descriptor = os.open(folder, os.O_RDONLY)
            _wait_for_lock(descriptor, folder)
        for written in (folder, folder / "parts"):
            remove_partials(written)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is no folder for results ({error}). {CHOOSE_OUT}") from error
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _wait_for_lock(descriptor: int, folder: Path) -> None:
    assert fcntl is not None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.stderr.write(f"waiting for another run that writes to {folder}\n")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        pass  # a file system without locks


def _prepare(folder: Path, metadata: dict[str, Any], *, force: bool) -> bool:
    """Make the folder ready for a run with this metadata; True if it contains the finished run.

    A kill at any moment leaves a folder from which the next run goes on.
    """
    write(folder / ".probe", Path.touch)  # fails before anything is deleted or computed
    (folder / ".probe").unlink(missing_ok=True)
    if force:
        _write_json(folder / "run.json", metadata)  # from here on, nothing else counts as finished
        _remove_parts(folder)
        for path in [folder / "rows.parquet", *folder.glob("figure.*"), *folder.glob("details.*")]:
            path.unlink(missing_ok=True)
    if (folder / "run.json").exists():
        earlier = read_metadata(folder)
        other, name = earlier["experiment"], metadata["experiment"]
        if other != name:
            raise InputError(f"{folder} contains results of {other!r}, not {name!r}. {_REMEDY}")
        if earlier["config_hash"] != metadata["config_hash"]:
            _set_aside(folder, earlier["config_hash"])
        elif earlier.get("complete"):
            read_result(folder)  # complete rows have to be readable before their parts are deleted
            _remove_parts(folder)
            return True
    elif (folder / "rows.parquet").exists():
        raise _damaged(folder / "rows.parquet", "there is no run.json")
    _write_json(folder / "run.json", metadata)
    return False


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read and check `run.json`; an InputError names the file where it is damaged."""
    path = folder / "run.json"
    try:
        metadata = parse_json(_read_bytes(path, MAX_METADATA))
        _check_metadata(metadata)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    return metadata


def _check_metadata(metadata: Any) -> None:
    """Refuse metadata that `run_experiment` did not write; a ValueError says why."""
    check_plain(_Metadata, metadata, "run.json")
    if _depth(metadata) > 20:
        raise ValueError("it is nested too deeply")
    if metadata["config_hash"] != _config_hash(metadata):
        raise ValueError("its settings are not those of its config_hash")
    if metadata.get("complete") and metadata.get("metadata_sha256") != _metadata_hash(metadata):
        raise ValueError("its metadata_sha256 is not that of its content")


def _depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=0)


def read_result(folder: Path) -> Result:
    """Read a finished run and check its rows against their hash in the metadata."""
    metadata, path = read_metadata(folder), folder / "rows.parquet"
    if not metadata.get("complete"):
        raise InputError(f"{folder} contains an unfinished run: finish it with tacit reproduce.")
    with _report_damage(path):
        content = _read_bytes(path, MAX_BYTES)
        if _hash(content) != metadata["rows_sha256"]:
            raise ValueError("its sha256 is not the one in run.json")
        rows = _read_table(content).to_pandas(ignore_metadata=True)
        if len(rows) != metadata["rows"]:
            raise ValueError(f"it has {len(rows)} rows, and run.json says {metadata['rows']}")
    return Result(folder, metadata, rows, reused=len(rows))


def _read_table(content: bytes) -> "pa.Table":
    """A table of rows, if it is no larger than rows can be."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(pa.BufferReader(content))
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    values = sum(group.column(i).num_values for group in groups for i in range(group.num_columns))
    if not 0 <= max(values, file.metadata.num_rows) <= MAX_VALUES:
        raise ValueError(f"it has {values} values in {file.metadata.num_rows} rows")
    batches, size = [], 0
    for batch in file.iter_batches(1000):  # a text that is stored once may be in every row
        batches.append(batch)
        size += batch.nbytes
        if size > MAX_BYTES:
            raise ValueError(f"it needs more than {MAX_BYTES} bytes of memory")
    return pa.Table.from_batches(batches, schema=file.schema_arrow)


def _read_bytes(path: Path, most: int) -> bytes:
    """The content of a file of at most this many bytes; reading a pipe could wait forever."""
    if path.exists() and not path.is_file():
        raise ValueError("it is not a file")
    if path.stat().st_size > most:
        raise ValueError(f"it has more than {most} bytes")
    return path.read_bytes()


@contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    """Turn what reading a file of rows raises into an InputError that names it."""
    import pyarrow as pa

    unreadable = (OSError, ValueError, TypeError, KeyError, RecursionError, pa.ArrowException)
    try:
        yield
    except unreadable as error:
        raise _damaged(path, error) from error


def finished_folders(out: Path) -> Iterator[Path]:
    """Folders of finished runs: this folder, or up to two levels below it.

    Folders that are not tacit's, that are damaged, or that were set aside are skipped.
    """
    for path in sorted([*out.glob("run.json"), *out.glob("*/run.json"), *out.glob("*/*/run.json")]):
        try:
            complete = read_metadata(path.parent).get("complete")
        except InputError:
            continue
        if complete and not path.parent.name.startswith("earlier-"):
            yield path.parent


def content_hash(rows: list[Row]) -> str:
    """A hash of the rows without what was measured: equal for two runs of one configuration."""
    fixed = [{k: v for k, v in row.items() if not k.endswith(MEASURED)} for row in rows]
    return _hash(json.dumps(fixed, sort_keys=True).encode())


def write(path: Path, fill: Callable[[Path], object], *, remedy: str = CHOOSE_OUT) -> None:
    """Write a file of a result completely or not at all, and make its folder."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} cannot be written to (it is not a file). {remedy}")
    write_atomically(path, fill, remedy=remedy, make_folder=True)


def _damaged(path: Path, error: Exception | str) -> InputError:
    reason = " ".join(str(error).split())[:300]
    return InputError(f"{path} is damaged or not written by tacit ({reason}). {_REMEDY}")


def _set_aside(folder: Path, config_hash: str) -> None:
    """Move rows of another configuration away, so that they never mix with new ones.

    `run.json` is moved last: where it is missing, an earlier move was interrupted and goes on.
    """
    prefix = f"earlier-{config_hash[:8]}"
    names = (f"{prefix}-{count}" if count else prefix for count in itertools.count())
    aside = next(a for name in names if not (a := folder / name).joinpath("run.json").exists())
    metadata = folder / "run.json"
    others = [p for p in folder.iterdir() if p != metadata and not p.name.startswith("earlier-")]
    try:
        aside.mkdir(exist_ok=True)
        for path in (*others, metadata):
            path.replace(aside / path.name)
    except OSError as error:
        raise InputError(f"{folder} cannot be changed ({error}). {CHOOSE_OUT}") from error


def _read_parts(folder: Path, config_hash: str) -> "dict[str, pa.Table]":
    """The tables of finished units, by the unit's name."""
    parts = {}
    for path in sorted((folder / "parts").glob("*.parquet")):
        with _report_damage(path):
            content = _read_bytes(
                path, MAX_BYTES
            )  # compared first: damaged tables can crash their reader
            if not path.stem.endswith(f"-{_hash(content)[:16]}"):
                raise ValueError("its sha256 is not the one in its name")
            table = _read_table(content)
            origin = json.loads((table.schema.metadata or {})[b"tacit"])
            if origin["config_hash"] != config_hash:
                raise ValueError("it belongs to another configuration")
            parts[origin["unit"]] = table
    return parts


def _write_part(folder: Path, index: int, rows: list[Row], config_hash: str) -> "pa.Table":
    """Write the rows of one unit, and return the table that will be read.

    The hash of the file is in its name.
    """
    import pyarrow as pa

    unit = rows[0]["unit"]
    # pyarrow takes the columns from the first row only, and rows of one unit may differ in theirs.
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    origin = json.dumps({"unit": unit, "config_hash": config_hash})
    content = _to_parquet(table.replace_schema_metadata({b"tacit": origin.encode()}))
    slug = re.sub(r"[^a-z0-9.]+", "-", unit.lower())
    path = folder / "parts" / f"{index:05d}-{slug}-{_hash(content)[:16]}.parquet"
    write(path, lambda partial: partial.write_bytes(content))
    return _read_table(content)


def _join_parts(folder: Path, parts: "list[pa.Table]", metadata: dict[str, Any]) -> None:
    """Write all rows to `rows.parquet`, complete the metadata, and delete the parts."""
    import pyarrow as pa

    plain = [part.replace_schema_metadata(None) for part in parts]
    with _report_damage(folder / "parts"):
        table = pa.concat_tables(plain, promote_options="permissive")
        hash_of_rows = content_hash(table.to_pylist())
    content = _to_parquet(table)
    write(folder / "rows.parquet", lambda partial: partial.write_bytes(content))
    versions = {name: _version(name) for name in VERSIONS}
    complete = {
        **metadata,
        "complete": True,
        "rows": table.num_rows,
        "rows_sha256": _hash(content),
        "content_hash": hash_of_rows,
        "versions": {**versions, "python": platform.python_version()},
        "platform": platform.platform(terse=True),
    }
    complete["metadata_sha256"] = _metadata_hash(complete)
    _write_json(folder / "run.json", complete)
    _remove_parts(folder)


def _to_parquet(table: "pa.Table") -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()


def _remove_parts(folder: Path) -> None:
    if (folder / "parts").is_dir():
        shutil.rmtree(folder / "parts", ignore_errors=True)


def _version(name: str) -> str:
    """The version of a package; that of tacit is right in a source tree too."""
    if name == "tacit":
        return tacit.__version__
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write(path, lambda partial: partial.write_text(json.dumps(content, indent=2) + "\n"))


def _config_hash(metadata: dict[str, Any]) -> str:
    """What tells configurations apart: all settings, and the versions that numbers depend on."""
    settings = {key: metadata[key] for key in _SETTINGS}
    return _hash(json.dumps(settings, sort_keys=True).encode())


def _metadata_hash(metadata: dict[str, Any]) -> str:
    apart = ("metadata_sha256", "note")
    content = {key: value for key, value in metadata.items() if key not in apart}
    return _hash(json.dumps(content, sort_keys=True).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
