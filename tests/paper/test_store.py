"""Rows survive interruptions, configurations never mix, and damage is reported."""

import fcntl
import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
from support.experiments import run as run_units
from support.toy_experiment import Config, run, toy_experiment

import tacit
from tacit.atomic import PARTIAL
from tacit_paper import store


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


def test_a_source_tree_need_not_be_installed_and_knows_its_version(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "VERSIONS", ("tacit", "torch", "no-such-package"))
    installed = store.version

    def version(name):
        return installed("no-such-package" if name == "tacit" else name)

    monkeypatch.setattr(store, "version", version)
    metadata = run(tmp_path, toy_experiment()).metadata
    assert metadata["versions"]["no-such-package"] == "not installed"
    assert metadata["versions"]["tacit"] == metadata["made_with"]["tacit"] == tacit.__version__


def test_rows_of_a_time_when_a_source_tree_had_no_version_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_version", lambda name: "not installed")
    old = run(tmp_path, toy_experiment())
    monkeypatch.undo()
    assert old.metadata["versions"]["tacit"] == "not installed"
    assert store.read_result(tmp_path).rows.equals(old.rows)


def test_every_column_of_every_row_is_stored(tmp_path):
    rows = run(tmp_path, toy_experiment()).rows
    expected = list(run_units(toy_experiment(), Config()))
    for row, expected_row in zip(rows.to_dict("records"), expected, strict=True):
        for name, value in expected_row.items():
            stored = list(row[name]) if name == "matrix" else row[name]
            assert stored == value or (value is None and stored != stored), name


@pytest.mark.parametrize("column", ["x_seconds", "x_bytes"])
def test_the_content_hash_excludes_measured_times_and_memory(column):
    rows = [{"a": 1, column: 2}], [{"a": 1, column: 3}], [{"a": 2}]
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
    with pytest.raises(tacit.InputError, match="not that of its content"):
        run(tmp_path, toy_experiment())
    assert list(store.finished_folders(tmp_path)) == []


def edit_metadata(folder, **changes):
    metadata = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(metadata | changes))


MADE_UP = {
    "deep nesting": ({"config": "[" * 50_000}, "nested too deeply"),
    "nesting that can be read": ({"config": {"a": "[" * 100 + "]" * 100}}, "nested too deeply"),
    "a hash that is a path": ({"config_hash": "a/../../b"}, "not those of its config_hash"),
    "other settings": ({"config": {"pieces": 5, "factor": 1.0}}, "not those of its config_hash"),
    "another version": ({"versions": {"torch": "9"}}, "not that of its content"),
    "a number of rows that is none": ({"rows": True}, "rows of run.json is 'True'"),
    "something more": ({"extra": 1}, "unknown parts: 'extra'"),
    "a preset that is no text": ({"preset": 3}, "preset of run.json is '3'"),
    "half a character": ({"preset": "\ud800"}, "preset of run.json"),
    "no object": ([], r"run.json is '\[\]'"),
    "a megabyte": ({"note": "x" * 2**20}, "more than 1048576 bytes"),
}


@pytest.mark.parametrize("name", MADE_UP)
def test_made_up_metadata_are_refused(tmp_path, name):
    run(tmp_path, toy_experiment())
    changes, words = MADE_UP[name]
    if isinstance(changes, list):
        (tmp_path / "run.json").write_text("[]")
    else:
        edit_metadata(tmp_path, **changes)
        text = (tmp_path / "run.json").read_text()
        (tmp_path / "run.json").write_text(re.sub(r'"(\[+\]*)"', r"\1", text))
    with pytest.raises(tacit.InputError, match=rf"run.json is damaged.*{words}.*--force"):
        run(tmp_path, toy_experiment())
    assert list(store.finished_folders(tmp_path)) == []


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    run(tmp_path, toy_experiment())
    text = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(text.replace("{", '{"preset": "paper",', 1))
    with pytest.raises(tacit.InputError, match="a key twice"):
        store.read_result(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "rows.parquet", "parts/00000.parquet"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_what_is_no_file_is_neither_read_nor_written(tmp_path, name, kind):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, toy_experiment(fail_at="piece 2"))
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(tacit.InputError, match=rf"{name} .*it is not a file"):
        run(tmp_path, toy_experiment())


def test_texts_that_would_fill_the_memory_are_refused(tmp_path, monkeypatch):
    """A text of a column is stored once, and is in memory once per row."""
    import pyarrow as pa

    content = store._to_parquet(pa.table({"text": ["x" * 1000] * 5000}))
    assert len(content) < 5000
    monkeypatch.setattr(store, "MAX_BYTES", 10**6)
    with pytest.raises(ValueError, match="more than 1000000 bytes of memory"):
        store._read_table(content)


def test_parts_that_do_not_fit_together_are_reported(tmp_path):
    for index, value in enumerate(("text", 1.0)):
        store._write_part(tmp_path, index, [{"unit": f"piece {index}", "value": value}], "0")
    tables = list(store._read_parts(tmp_path, "0").values())
    with pytest.raises(tacit.InputError, match=r"parts is damaged.*incompatible types.*--force"):
        store._join_parts(tmp_path, tables, {})


def test_a_folder_may_have_a_name_that_is_no_text(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path / "name") + b"\xff"))
    assert len(run(folder, toy_experiment()).rows) == 8


def test_a_note_by_hand_is_kept(tmp_path):
    run(tmp_path, toy_experiment())
    edit_metadata(tmp_path, note="Columns were renamed after the run.")
    assert store.read_result(tmp_path).metadata["note"]
    assert run(tmp_path, toy_experiment()).reused == 8


def test_rows_that_would_fill_the_memory_are_refused(tmp_path):
    """Equal values are compressed to nothing: here 10⁸ in some kilobytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    run(tmp_path, toy_experiment())
    path = tmp_path / "rows.parquet"
    with pq.ParquetWriter(path, pa.schema({"value": pa.bool_()}), compression="zstd") as writer:
        part = pa.table({"value": pa.array([True]).take(pa.nulls(1_000_001, pa.int32()))})
        for _ in range(100):
            writer.write_table(part)
    metadata = json.loads((tmp_path / "run.json").read_text())
    metadata |= {"rows_sha256": store._hash(path.read_bytes()), "rows": 100_000_100}
    metadata["metadata_sha256"] = store._metadata_hash(metadata)
    (tmp_path / "run.json").write_text(json.dumps(metadata))
    with pytest.raises(tacit.InputError, match="it has 100000100 values"):
        store.read_result(tmp_path)


def test_a_part_with_other_rows_is_refused(tmp_path):
    import pyarrow.parquet as pq

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, toy_experiment(fail_at="piece 2"))
    path = min((tmp_path / "parts").iterdir())
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    with pytest.raises(tacit.InputError, match=r"00000-piece-0-\w+.parquet is damaged.*sha256"):
        run(tmp_path, toy_experiment())


def test_rows_that_were_half_set_aside_stay_together(tmp_path):
    first = run(tmp_path, toy_experiment())
    aside = tmp_path / f"earlier-{first.metadata['config_hash'][:8]}"
    aside.mkdir()
    (tmp_path / "rows.parquet").replace(aside / "rows.parquet")  # and here it was killed
    run(tmp_path, toy_experiment(Config(factor=2.0)))
    assert store.read_result(aside).rows.equals(first.rows)
    assert len(list(tmp_path.glob("earlier-*"))) == 1


def test_a_forced_run_that_is_killed_early_goes_on(tmp_path, monkeypatch):
    whole = run(tmp_path, toy_experiment())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, toy_experiment(), force=True)
    assert run(tmp_path, toy_experiment()).rows.equals(whole.rows)


def test_parts_that_a_kill_left_beside_finished_rows_are_deleted(tmp_path):
    run(tmp_path, toy_experiment())
    (tmp_path / "parts").mkdir()
    run(tmp_path, toy_experiment())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.parquet", "run.json"]


@pytest.mark.parametrize("name", ["run.json", "rows.parquet", "parts"])
def test_a_folder_where_a_file_should_be_is_reported(tmp_path, name):
    if name == "parts":
        (tmp_path / "parts").write_text("a file where a folder should be")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(tacit.InputError, match=rf"{name}.* (is damaged|cannot be written to)"):
        run(tmp_path, toy_experiment())
    assert (tmp_path / name).exists()


def test_a_second_run_in_a_folder_waits_for_the_first(tmp_path, capfd):
    held, ended = threading.Event(), threading.Event()

    def hold():
        with store.locked(tmp_path):
            held.set()
            assert not ended.wait(0.3)
            (tmp_path / "first").touch()

    first = threading.Thread(target=hold)
    first.start()
    held.wait()
    with store.locked(tmp_path):
        assert (tmp_path / "first").exists()
    ended.set()
    first.join()
    assert "waiting for another run that writes to" in capfd.readouterr().err


def test_a_lock_removes_what_a_killed_run_left(tmp_path):
    (tmp_path / "parts").mkdir()
    for folder in (tmp_path, tmp_path / "parts"):
        (folder / f".1{PARTIAL}").touch()
    with store.locked(tmp_path):
        assert [p.name for p in tmp_path.rglob("*")] == ["parts"]


def test_a_file_system_without_locks_is_used_all_the_same(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", fail)
    with store.locked(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    monkeypatch.setattr(store, "fcntl", None)
    with store.locked(tmp_path / "newer"):
        assert (tmp_path / "newer").is_dir()


@pytest.mark.parametrize("folder", ["/proc/tacit", "/dev/null/tacit", "/dev/null"])
def test_a_folder_that_cannot_be_made_is_reported(folder):
    refused = pytest.raises(tacit.InputError, match=rf"{folder} is no folder.*another --out")
    with refused, store.locked(Path(folder)):
        pass


@pytest.mark.skipif(os.getuid() == 0, reason="root writes to read-only folders")
def test_a_read_only_folder_is_reported(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(tacit.InputError, match=r"cannot be written to \(Permission denied"):
        run(tmp_path, toy_experiment())
