"""Rows survive interruptions, never mix, and damage is reported."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import tacit
from tacit_paper import pending, store


@dataclass(frozen=True)
class Config:
    pieces: int = 4
    factor: float = 1.0


def toy(config=None, *, fail_at=None, calls=None):
    """A small experiment that can be made to break off at a unit."""

    def units(config):
        return [f"piece {i}" for i in range(config.pieces)]

    def run(config, *, finished=(), device="cpu") -> Iterator[dict]:
        for unit in pending(units(config), finished):
            number = int(unit.split()[1])
            if calls is not None:
                calls.append(unit)
            yield {"unit": unit, "k": 0, "value": config.factor * number, "took_seconds": 0.1}
            if unit == fail_at:
                raise KeyboardInterrupt
            yield {"unit": unit, "k": 1, "matrix": [1.0, number], "note": "x" if number else None}

    return SimpleNamespace(
        Config=Config, QUICK=config or Config(), PAPER=Config(6), units=units, run=run,
        TITLE="Toy", CAPTION="", plot=None, check=lambda rows: [],
    )  # fmt: skip


def execute(folder, experiment, **options):
    return store.execute("toy", experiment, "quick", folder, **options)


def test_an_interrupted_run_goes_on_where_it_was_and_ends_the_same(tmp_path):
    whole = execute(tmp_path / "whole", toy())
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path / "broken", toy(fail_at="piece 2"))
    calls, told = [], []
    again = execute(
        tmp_path / "broken",
        toy(calls=calls),
        advance=lambda done, total: told.append((done, total)),
    )
    assert calls == ["piece 2", "piece 3"]
    assert told == [(2, 4), (3, 4), (4, 4)]
    assert again.reused == 4
    assert again.head["content_hash"] == whole.head["content_hash"]
    assert again.rows.equals(whole.rows)
    assert sorted(p.name for p in again.folder.iterdir()) == ["rows.parquet", "run.json"]


def test_a_finished_run_is_reused_whole(tmp_path):
    execute(tmp_path, toy())
    calls = []
    again = execute(tmp_path, toy(calls=calls))
    assert (calls, again.reused) == ([], 8)
    forced = execute(tmp_path, toy(calls=calls), force=True)
    assert (len(calls), forced.reused) == (4, 0)


def test_another_configuration_never_mixes_with_old_rows(tmp_path):
    first = execute(tmp_path, toy())
    other = execute(tmp_path, toy(Config(factor=2.0)))
    assert other.reused == 0
    assert other.rows.value.dropna().tolist() == [0, 2, 4, 6]
    aside = tmp_path / f"earlier-{first.head['config_hash'][:8]}"
    assert store.read(aside).rows.equals(first.rows)
    assert list(store.results(tmp_path)) == [tmp_path]


def test_an_unfinished_run_of_another_configuration_is_set_aside_too(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, toy(fail_at="piece 2"))
    other = execute(tmp_path, toy(Config(factor=3.0)))
    assert (other.reused, other.rows.value.max()) == (0, 9)


def test_the_head_says_what_made_the_rows(tmp_path):
    head = execute(tmp_path, toy()).head
    assert head["config"] == {"pieces": 4, "factor": 1.0}
    assert {"torch", "python", "tacit"} <= head["versions"].keys()
    assert head["rows"] == 8


def test_a_source_tree_that_is_not_installed_will_do(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "VERSIONS", ("torch", "no-such-package"))
    assert execute(tmp_path, toy()).head["versions"]["no-such-package"] == "not installed"


def test_every_column_of_every_row_is_kept(tmp_path):
    rows = execute(tmp_path, toy()).rows
    expected = list(toy().run(Config()))
    for found, row in zip(rows.to_dict("records"), expected, strict=True):
        for name, value in row.items():
            kept = list(found[name]) if name == "matrix" else found[name]
            assert kept == value or (value is None and kept != kept), name


def test_the_content_hash_leaves_measured_times_out():
    rows = [{"a": 1, "x_seconds": 2.0}], [{"a": 1, "x_seconds": 3.0}], [{"a": 2}]
    same, also, other = map(store.content_hash, rows)
    assert same == also != other


def damage_rows(folder):
    (folder / "rows.parquet").write_bytes(b"PAR1 not really")


def truncate_rows(folder):
    content = (folder / "rows.parquet").read_bytes()
    (folder / "rows.parquet").write_bytes(content[: len(content) // 2])


def remove_rows(folder):
    (folder / "rows.parquet").unlink()


def damage_head(folder):
    (folder / "run.json").write_text("{")


def foreign_head(folder):
    (folder / "run.json").write_text(json.dumps({"hello": 1}))


def other_experiment(folder):
    head = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**head, "experiment": "another"}))


def no_head(folder):
    (folder / "run.json").unlink()


@pytest.mark.parametrize(
    "harm",
    [damage_rows, truncate_rows, remove_rows, damage_head, foreign_head, other_experiment, no_head],
)
def test_damage_is_reported_and_nothing_is_overwritten(tmp_path, harm):
    execute(tmp_path, toy())
    harm(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(tacit.InputError, match=r"damaged|not tacit's|holds results of 'another'"):
        execute(tmp_path, toy())
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert execute(tmp_path, toy(), force=True).reused == 0


def test_a_damaged_part_is_reported(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, toy(fail_at="piece 2"))
    part = next((tmp_path / "parts").iterdir())
    part.write_bytes(b"")
    with pytest.raises(tacit.InputError, match=rf"{part.name} is damaged"):
        execute(tmp_path, toy())
    assert part.read_bytes() == b""


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(tacit.InputError, match=r"cannot be written to .*another --out"):
        execute(tmp_path / "file" / "below", toy())


def test_units_that_yield_nothing_are_a_bug_that_is_raised(tmp_path):
    broken = toy()
    broken.run = lambda config, *, finished=(), device="cpu": iter(())
    with pytest.raises(RuntimeError, match="yielded no rows"):
        execute(tmp_path, broken)
    shutil.rmtree(tmp_path)


def test_rows_of_another_device_or_version_are_set_aside(tmp_path, monkeypatch):
    execute(tmp_path, toy())
    assert execute(tmp_path, toy(), device="meta").reused == 0
    monkeypatch.setattr(store, "_version", lambda name: "99")
    assert execute(tmp_path, toy(), device="meta").reused == 0
    assert len(list(tmp_path.glob("earlier-*"))) == 2
    assert execute(tmp_path, toy(), device="meta").reused == 8


def test_nothing_set_aside_is_ever_lost(tmp_path):
    for factor in (1.0, 2.0, 1.0, 2.0):
        execute(tmp_path, toy(Config(factor=factor)))
    assert len(list(tmp_path.glob("earlier-*"))) == 3


def headless_rows(folder):
    head = json.loads((folder / "run.json").read_text())
    del head["rows_sha256"]
    (folder / "run.json").write_text(json.dumps(head))


def test_a_head_without_its_hash_is_damaged(tmp_path):
    execute(tmp_path, toy())
    headless_rows(tmp_path)
    with pytest.raises(tacit.InputError, match="rows_sha256 missing"):
        execute(tmp_path, toy())
    assert list(store.results(tmp_path)) == []
