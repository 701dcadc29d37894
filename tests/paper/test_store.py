"""Rows survive interruptions, configurations never mix, and damage is reported."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
from support.experiments import run as run_units

import tacit
from tacit_paper import store


@dataclass(frozen=True)
class Config:
    pieces: int = 4
    factor: float = 1.0


def toy_experiment(config=None, *, fail_at=None, calls=None):
    """A small experiment. It records its units in `calls`, and is interrupted in `fail_at`."""

    def rows(config, unit, number) -> Iterator[dict]:
        if calls is not None:
            calls.append(unit)
        yield {"k": 0, "value": config.factor * number, "took_seconds": 0.1}
        if unit == fail_at:
            raise KeyboardInterrupt
        yield {"k": 1, "matrix": [1.0, number], "note": "x" if number else None}

    def work(config, device):
        units = {f"piece {i}": i for i in range(config.pieces)}
        return {unit: partial(rows, config, unit, number) for unit, number in units.items()}

    return SimpleNamespace(
        Config=Config, QUICK=config or Config(), PAPER=Config(6), work=work,
        __doc__="Toy", plot=None, check=lambda rows: [],
    )  # fmt: skip


def run(folder, experiment, **options):
    return store.run_experiment("toy", experiment, "quick", folder, **options)


def test_an_interrupted_run_resumes_and_ends_the_same(tmp_path):
    uninterrupted = run(tmp_path / "uninterrupted", toy_experiment())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "interrupted", toy_experiment(fail_at="piece 2"))
    calls, progress = [], []
    resumed = run(
        tmp_path / "interrupted",
        toy_experiment(calls=calls),
        advance=lambda done, total: progress.append((done, total)),
    )
    assert calls == ["piece 2", "piece 3"]
    assert progress == [(2, 4), (3, 4), (4, 4)]
    assert resumed.reused == 4
    assert resumed.metadata["content_hash"] == uninterrupted.metadata["content_hash"]
    assert resumed.rows.equals(uninterrupted.rows)
    assert sorted(p.name for p in resumed.folder.iterdir()) == ["rows.parquet", "run.json"]


def test_a_finished_run_is_reused_completely(tmp_path):
    run(tmp_path, toy_experiment())
    calls = []
    second = run(tmp_path, toy_experiment(calls=calls))
    assert (calls, second.reused) == ([], 8)
    forced = run(tmp_path, toy_experiment(calls=calls), force=True)
    assert (len(calls), forced.reused) == (4, 0)


def test_another_configuration_never_mixes_with_old_rows(tmp_path):
    first = run(tmp_path, toy_experiment())
    other = run(tmp_path, toy_experiment(Config(factor=2.0)))
    assert other.reused == 0
    assert other.rows.value.dropna().tolist() == [0, 2, 4, 6]
    aside = tmp_path / f"earlier-{first.metadata['config_hash'][:8]}"
    assert store.read_result(aside).rows.equals(first.rows)
    assert list(store.finished_folders(tmp_path)) == [tmp_path]


def test_an_unfinished_run_of_another_configuration_is_set_aside_too(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, toy_experiment(fail_at="piece 2"))
    other = run(tmp_path, toy_experiment(Config(factor=3.0)))
    assert (other.reused, other.rows.value.max()) == (0, 9)


def test_the_metadata_names_configuration_and_versions(tmp_path):
    metadata = run(tmp_path, toy_experiment()).metadata
    assert metadata["config"] == {"pieces": 4, "factor": 1.0}
    assert {"torch", "python", "tacit"} <= metadata["versions"].keys()
    assert metadata["rows"] == 8


def test_a_source_tree_need_not_be_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "VERSIONS", ("torch", "no-such-package"))
    assert (
        run(tmp_path, toy_experiment()).metadata["versions"]["no-such-package"] == "not installed"
    )


def test_every_column_of_every_row_is_stored(tmp_path):
    rows = run(tmp_path, toy_experiment()).rows
    expected = list(run_units(toy_experiment(), Config()))
    for row, expected_row in zip(rows.to_dict("records"), expected, strict=True):
        for name, value in expected_row.items():
            stored = list(row[name]) if name == "matrix" else row[name]
            assert stored == value or (value is None and stored != stored), name


def test_the_content_hash_excludes_measured_times():
    rows = [{"a": 1, "x_seconds": 2.0}], [{"a": 1, "x_seconds": 3.0}], [{"a": 2}]
    first, other_time, other_value = map(store.content_hash, rows)
    assert first == other_time != other_value


def damage_rows(folder):
    (folder / "rows.parquet").write_bytes(b"PAR1 not really")


def truncate_rows(folder):
    content = (folder / "rows.parquet").read_bytes()
    (folder / "rows.parquet").write_bytes(content[: len(content) // 2])


def remove_rows(folder):
    (folder / "rows.parquet").unlink()


def damage_metadata(folder):
    (folder / "run.json").write_text("{")


def replace_metadata(folder):
    (folder / "run.json").write_text(json.dumps({"hello": 1}))


def rename_experiment(folder):
    metadata = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**metadata, "experiment": "another"}))


def remove_metadata(folder):
    (folder / "run.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        damage_rows, truncate_rows, remove_rows, damage_metadata, replace_metadata,
        rename_experiment, remove_metadata,
    ],
)  # fmt: skip
def test_damage_is_reported_and_nothing_is_overwritten(tmp_path, damage):
    run(tmp_path, toy_experiment())
    damage(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(
        tacit.InputError, match=r"(damaged|not written by tacit|of 'another').*--force"
    ):
        run(tmp_path, toy_experiment())
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert run(tmp_path, toy_experiment(), force=True).reused == 0


def test_a_damaged_part_is_reported(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, toy_experiment(fail_at="piece 2"))
    part = next((tmp_path / "parts").iterdir())
    part.write_bytes(b"")
    with pytest.raises(tacit.InputError, match=rf"{part.name} is damaged"):
        run(tmp_path, toy_experiment())
    assert part.read_bytes() == b""


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(tacit.InputError, match=r"cannot be written to .*another --out"):
        run(tmp_path / "file" / "below", toy_experiment())


def test_a_unit_without_rows_is_an_error(tmp_path):
    broken = toy_experiment()
    broken.work = lambda config, device: {"piece 0": lambda: iter(())}
    with pytest.raises(RuntimeError, match="no rows for the unit"):
        run(tmp_path, broken)
    shutil.rmtree(tmp_path)


def test_rows_of_another_device_or_version_are_set_aside(tmp_path, monkeypatch):
    run(tmp_path, toy_experiment())
    assert run(tmp_path, toy_experiment(), device="meta").reused == 0
    monkeypatch.setattr(store, "_version", lambda name: "99")
    assert run(tmp_path, toy_experiment(), device="meta").reused == 0
    assert len(list(tmp_path.glob("earlier-*"))) == 2
    assert run(tmp_path, toy_experiment(), device="meta").reused == 8


def test_rows_that_were_set_aside_are_never_overwritten(tmp_path):
    for factor in (1.0, 2.0, 1.0, 2.0):
        run(tmp_path, toy_experiment(Config(factor=factor)))
    assert len(list(tmp_path.glob("earlier-*"))) == 3


def test_metadata_without_the_hash_of_the_rows_is_damaged(tmp_path):
    run(tmp_path, toy_experiment())
    metadata = json.loads((tmp_path / "run.json").read_text())
    del metadata["rows_sha256"]
    (tmp_path / "run.json").write_text(json.dumps(metadata))
    with pytest.raises(tacit.InputError, match="rows_sha256 missing"):
        run(tmp_path, toy_experiment())
    assert list(store.finished_folders(tmp_path)) == []
