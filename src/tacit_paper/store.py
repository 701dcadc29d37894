"""Rows on disk: written unit by unit, each file complete or absent, configurations never mixed.

A result folder contains `run.json` (the metadata: configuration, versions, hashes), `rows.parquet`
and the figure. During a run, finished units are in `parts/`, from where the next run resumes.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.errors import InputError
from tacit_paper import Experiment, Row, Table

if TYPE_CHECKING:
    import pyarrow as pa

VERSIONS = ("tacit", "torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "scikit-learn")
"""Packages whose versions are written to the metadata."""
_REMEDY = "Move it away, or pass --force to replace it."


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
    config = getattr(experiment, preset.upper())
    metadata: dict[str, Any] = {"experiment": name, "preset": preset, "config": asdict(config)}
    metadata |= {"device": device, "made_with": {n: _version(n) for n in ("tacit", "torch")}}
    metadata["config_hash"] = _hash(json.dumps(metadata, sort_keys=True).encode())
    if _prepare(folder, metadata, force=force):
        return read_result(folder)
    work = experiment.work(config, device)
    parts = _read_parts(folder, metadata["config_hash"])
    reused = sum(len(part) for part in parts.values())
    advance(len(parts), len(work))
    for index, (unit, make_rows) in enumerate(work.items()):
        if unit not in parts:
            rows = [{"unit": unit, **row} for row in make_rows()]
            if not rows:
                raise RuntimeError(f"no rows for the unit {unit!r} of {name}: yield at least one.")
            parts[unit] = _write_part(folder, index, rows, metadata["config_hash"])
            advance(len(parts), len(work))
    _join_parts(folder, [parts[unit] for unit in work], metadata)
    return replace(read_result(folder), reused=reused)


def _prepare(folder: Path, metadata: dict[str, Any], *, force: bool) -> bool:
    """Make the folder ready for a run with this metadata; True if it contains the finished run."""
    write_atomically(folder / ".probe", Path.touch)  # fails before anything is deleted or computed
    (folder / ".probe").unlink()
    if force:
        shutil.rmtree(folder / "parts", ignore_errors=True)
        for path in [folder / "run.json", folder / "rows.parquet", *folder.glob("figure.*")]:
            path.unlink(missing_ok=True)
    if (folder / "run.json").exists():
        earlier = read_metadata(folder)
        other, name = earlier["experiment"], metadata["experiment"]
        if other != name:
            raise InputError(f"{folder} contains results of {other!r}, not {name!r}. {_REMEDY}")
        if earlier["config_hash"] != metadata["config_hash"]:
            _set_aside(folder, earlier["config_hash"])
        elif earlier.get("complete"):
            return True
    elif (folder / "rows.parquet").exists():
        raise _damaged(folder / "rows.parquet", "there is no run.json")
    _write_json(folder / "run.json", metadata)
    return False


def read_metadata(folder: Path) -> dict[str, Any]:
    """Read and check `run.json`; an InputError names the file where it is damaged."""
    path = folder / "run.json"
    try:
        metadata = json.loads(path.read_text())
        types = {"experiment": str, "preset": str, "config": dict, "config_hash": str}
        types |= {"rows": int, "rows_sha256": str} if metadata.get("complete") else {}
        wrong = [key for key, kind in types.items() if not isinstance(metadata.get(key), kind)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} missing or wrong")
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(path, error) from error
    return metadata


def read_result(folder: Path) -> Result:
    """Read a finished run and check its rows against their hash in the metadata."""
    import pyarrow.parquet as pq

    metadata, path = read_metadata(folder), folder / "rows.parquet"
    if not metadata.get("complete"):
        raise InputError(f"{folder} contains an unfinished run: finish it with tacit reproduce.")
    try:
        if _hash(path.read_bytes()) != metadata["rows_sha256"]:
            raise ValueError("its sha256 is not the one in run.json")
        rows = pq.read_table(path).to_pandas()
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return Result(folder, metadata, rows, reused=len(rows))


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
    """A hash of the rows without measured times: equal for two runs of the same configuration."""
    untimed = [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows]
    return _hash(json.dumps(untimed, sort_keys=True).encode())


def write_atomically(path: Path, write: Callable[[Path], object], *, option: str = "--out") -> None:
    """Write a file completely or not at all: `write` fills a temporary file, which is renamed.

    `option` is the command-line option that sets the folder, for the error if it is not writable.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written to ({error}): choose another {option}."
        ) from error
    finally:
        if path.parent.is_dir():
            partial.unlink(missing_ok=True)


def _damaged(path: Path, error: Exception | str) -> InputError:
    return InputError(f"{path} is damaged or not written by tacit ({error}). {_REMEDY}")


def _set_aside(folder: Path, config_hash: str) -> None:
    """Move rows of another configuration away, so that they never mix with new ones."""
    prefix = f"earlier-{config_hash[:8]}"
    count = len(list(folder.glob(f"{prefix}*")))
    aside = folder / (f"{prefix}-{count}" if count else prefix)
    aside.mkdir()
    for path in list(folder.iterdir()):
        if not path.name.startswith("earlier-"):
            path.replace(aside / path.name)


def _read_parts(folder: Path, config_hash: str) -> "dict[str, pa.Table]":
    """The tables of finished units, by the unit's name."""
    import pyarrow.parquet as pq

    parts = {}
    for path in sorted((folder / "parts").glob("*.parquet")):
        try:
            table = pq.read_table(path)
            origin = json.loads((table.schema.metadata or {})[b"tacit"])
            if origin["config_hash"] != config_hash:
                raise ValueError("it belongs to another configuration")
        except (OSError, ValueError, KeyError) as error:
            raise _damaged(path, error) from error
        parts[origin["unit"]] = table
    return parts


def _write_part(folder: Path, index: int, rows: list[Row], config_hash: str) -> "pa.Table":
    """Write the rows of one unit, and return them as a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    unit = rows[0]["unit"]
    origin = json.dumps({"unit": unit, "config_hash": config_hash})
    # pyarrow takes the columns from the first row only, and rows of one unit may differ in theirs.
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    table = table.replace_schema_metadata({b"tacit": origin.encode()})
    slug = re.sub(r"[^a-z0-9.]+", "-", unit.lower())
    path = folder / "parts" / f"{index:05d}-{slug}.parquet"
    write_atomically(path, lambda partial: pq.write_table(table, partial))
    return table


def _join_parts(folder: Path, parts: "list[pa.Table]", metadata: dict[str, Any]) -> None:
    """Write all rows to `rows.parquet`, complete the metadata, and delete the parts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = [part.replace_schema_metadata(None) for part in parts]
    table = pa.concat_tables(plain, promote_options="permissive")
    path = folder / "rows.parquet"
    write_atomically(path, lambda partial: pq.write_table(table, partial))
    versions = {name: _version(name) for name in VERSIONS}
    complete = {
        **metadata,
        "complete": True,
        "rows": table.num_rows,
        "rows_sha256": _hash(path.read_bytes()),
        "content_hash": content_hash(table.to_pylist()),
        "versions": {**versions, "python": platform.python_version()},
        "platform": platform.platform(terse=True),
    }
    _write_json(folder / "run.json", complete)
    shutil.rmtree(folder / "parts", ignore_errors=True)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # tacit itself, when run from a source tree
        return "not installed"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, lambda partial: partial.write_text(json.dumps(content, indent=2) + "\n"))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
