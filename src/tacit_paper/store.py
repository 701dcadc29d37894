"""Rows on disk: written as they are finished, whole or not at all, and never mixed.

A result folder holds `run.json` (configuration, versions, hashes), `rows.parquet`, and the figures.
While a run is under way its finished units lie in `parts/`; the next run picks them up there.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.errors import InputError
from tacit_paper import Experiment, Row

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

VERSIONS = (
    "tacit", "torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "scikit-learn",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A finished run: where it is, what made it, and its rows."""

    folder: Path
    head: dict[str, Any]
    rows: "pd.DataFrame"
    reused: int
    """How many of the rows an earlier run had left."""


def execute(
    name: str,
    experiment: Experiment,
    preset: str,
    folder: Path,
    *,
    device: str = "cpu",
    force: bool = False,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Run what is missing of an experiment, and read it back.

    Args:
        name: the experiment's name.
        experiment: its module.
        preset: `quick` or `paper`.
        folder: where its files go.
        device: where tensors live.
        force: forget what is there and start anew.
        advance: is told how many units are done, of how many.
    """
    config = getattr(experiment, preset.upper())
    head: dict[str, Any] = {"experiment": name, "preset": preset, "config": asdict(config)}
    head |= {"device": device, "made_with": {n: _version(n) for n in ("tacit", "torch")}}
    head["config_hash"] = _hash(json.dumps(head, sort_keys=True).encode())
    _make(folder)
    if force:
        _clear(folder)
    found = read_head(folder) if (folder / "run.json").exists() else None
    if found is not None:
        _check_owner(folder, found, name)
        if found["config_hash"] != head["config_hash"]:
            _set_aside(folder, found["config_hash"])
        elif found.get("complete"):
            done = read(folder)
            return Result(folder, done.head, done.rows, reused=len(done.rows))
    elif (folder / "rows.parquet").exists():
        raise InputError(f"{folder} holds rows.parquet without run.json: not tacit's. {_REMEDY}")
    _write_json(folder / "run.json", head)
    return _resume(experiment, config, folder, head, device=device, advance=advance)


def _resume(
    experiment: Experiment,
    config: Any,
    folder: Path,
    head: dict[str, Any],
    *,
    device: str,
    advance: Callable[[int, int], None],
) -> Result:
    units = experiment.units(config)
    parts = _read_parts(folder, head["config_hash"])
    reused, order = sum(len(part) for part in parts.values()), {u: i for i, u in enumerate(units)}
    advance(len(parts), len(units))
    rows = experiment.run(config, finished=frozenset(parts), device=device)
    for unit, group in groupby(rows, key=lambda row: row["unit"]):
        parts[unit] = _write_part(folder, order[unit], unit, list(group), head["config_hash"])
        advance(len(parts), len(units))
    missing = [unit for unit in units if unit not in parts]
    if missing:
        raise RuntimeError(f"{head['experiment']} yielded no rows for {missing}: its run is wrong")
    _finish(folder, [parts[unit] for unit in units], head)
    done = read(folder)
    return Result(folder, done.head, done.rows, reused=reused)


def read_head(folder: Path) -> dict[str, Any]:
    """What `run.json` says, or an error that names the file."""
    path = folder / "run.json"
    try:
        head = json.loads(path.read_text())
        kinds = {"experiment": str, "preset": str, "config": dict, "config_hash": str}
        kinds |= {"rows": int, "rows_sha256": str} if head.get("complete") else {}
        wrong = [key for key, kind in kinds.items() if not isinstance(head.get(key), kind)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} missing or wrong")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path} is damaged or not tacit's ({error}). {_REMEDY}") from error
    return head


def read(folder: Path) -> Result:
    """A finished run, checked against the hash that was written with it."""
    import pyarrow.parquet as pq

    head, path = read_head(folder), folder / "rows.parquet"
    if not head.get("complete"):
        raise InputError(f"{folder} holds an unfinished run: finish it with tacit reproduce.")
    try:
        content = path.read_bytes()
        if _hash(content) != head["rows_sha256"]:
            raise ValueError("its content is not what was written")
        rows = pq.read_table(path).to_pandas()
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or not tacit's ({error}). {_REMEDY}") from error
    return Result(folder, head, rows, reused=len(rows))


_REMEDY = "Move it away, or pass --force to replace it."


@contextmanager
def of_this_version(folder: Path) -> Iterator[None]:
    """Say it in words where rows lack what a figure shows, since another version wrote them."""
    try:
        yield
    except (KeyError, AttributeError) as error:
        raise InputError(
            f"the rows in {folder} were written by another version of tacit and lack what the "
            f"figure shows ({error}): tacit reproduce --force makes them anew."
        ) from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written to ({error}): choose another --out."
        ) from error


def _clear(folder: Path) -> None:
    shutil.rmtree(folder / "parts", ignore_errors=True)
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".parquet", ".svg", ".pdf", ".png"):
            path.unlink()


def _check_owner(folder: Path, head: dict[str, Any], name: str) -> None:
    if head["experiment"] != name:
        raise InputError(
            f"{folder} holds results of {head['experiment']!r}, not {name!r}. {_REMEDY}"
        )


def _set_aside(folder: Path, old: str) -> None:
    """Move rows of another configuration away, so that they can never mix with new ones."""
    taken = len(list(folder.glob(f"earlier-{old[:8]}*")))
    aside = folder / (f"earlier-{old[:8]}" + (f"-{taken}" if taken else ""))
    aside.mkdir()
    for path in list(folder.iterdir()):
        if not path.name.startswith("earlier-"):
            path.replace(aside / path.name)


def _read_parts(folder: Path, config_hash: str) -> "dict[str, pa.Table]":
    import pyarrow.parquet as pq

    parts = {}
    for path in sorted((folder / "parts").glob("*.parquet")):
        try:
            table = pq.read_table(path)
            about = json.loads((table.schema.metadata or {})[b"tacit"])
            if about["config_hash"] != config_hash:
                raise ValueError("it belongs to another configuration")
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{path} is damaged or not tacit's ({error}). {_REMEDY}") from error
        parts[about["unit"]] = table
    return parts


def _write_part(
    folder: Path, number: int, unit: str, rows: list[Row], config_hash: str
) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = json.dumps({"unit": unit, "config_hash": config_hash})
    names = dict.fromkeys(
        name for row in rows for name in row
    )  # rows may have columns of their own
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    table = table.replace_schema_metadata({b"tacit": about.encode()})
    slug = re.sub(r"[^a-z0-9.]+", "-", unit.lower())
    path = folder / "parts" / f"{number:05d}-{slug}.parquet"
    atomically(path, lambda partial: pq.write_table(table, partial))
    return table


def _finish(folder: Path, parts: "list[pa.Table]", head: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    bare = [part.replace_schema_metadata(None) for part in parts]
    table = pa.concat_tables(bare, promote_options="permissive")
    path = folder / "rows.parquet"
    atomically(path, lambda partial: pq.write_table(table, partial))
    whole = {
        **head,
        "complete": True,
        "rows": table.num_rows,
        "rows_sha256": _hash(path.read_bytes()),
        "content_hash": content_hash(table.to_pylist()),
        "versions": {name: _version(name) for name in VERSIONS}
        | {"python": platform.python_version()},
        "platform": platform.platform(terse=True),
    }
    _write_json(folder / "run.json", whole)
    shutil.rmtree(folder / "parts", ignore_errors=True)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a source tree
        return "not installed"


def content_hash(rows: list[Row]) -> str:
    """A hash of the rows without measured times: what two runs of one kind agree on."""
    bare = [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows]
    return _hash(json.dumps(bare, sort_keys=True).encode())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    atomically(path, lambda partial: partial.write_text(json.dumps(content, indent=2) + "\n"))


def atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error}). Choose another --out.") from error
    finally:
        if path.parent.is_dir():
            partial.unlink(missing_ok=True)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def results(out: Path) -> Iterator[Path]:
    """Folders of finished runs below a folder, or the folder itself; foreign ones are passed by."""
    for path in sorted([*out.glob("run.json"), *out.glob("*/run.json"), *out.glob("*/*/run.json")]):
        try:
            complete = read_head(path.parent).get("complete")
        except InputError:
            continue
        if complete and not path.parent.name.startswith("earlier-"):
            yield path.parent
