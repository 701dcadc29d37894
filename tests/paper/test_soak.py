"""Random edits of saved files and kills at random moments: few here, many in `make soak`.

An edited file is refused with an InputError, or what it holds is unchanged. After any number of
kills a run ends with the same rows, and no other file is left.
"""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
from support.bad_calls import OBJECTIVE
from support.damage import edit_randomly
from support.pages import ROOT

import tacit
from tacit_paper import store

FULL = "TACIT_SOAK" in os.environ
EDITS, KILLS = (200, 50) if FULL else (40, 4)


@dataclass(frozen=True)
class Config:
    pieces: int = 3


def rows_of(number):
    yield {"value": number / 3, "name": f"piece {number}", "matrix": [1.0, number]}


EXPERIMENT = SimpleNamespace(
    QUICK=Config(),
    work=lambda config, device: {f"unit {i}": partial(rows_of, i) for i in range(config.pieces)},
)


def failing_work(config, device):
    work = EXPERIMENT.work(config, device)
    return {**work, "unit 2": lambda: iter([1 / 0])}


def run(folder, work=EXPERIMENT.work):
    experiment = SimpleNamespace(QUICK=Config(), work=work)
    return store.run_experiment("toy", experiment, "quick", folder)


def make_equations(folder):
    candidates = [tacit.l2(), tacit.layerwise(tacit.smooth_l1(0.1))]
    parts = [tacit.endpoint_equations(OBJECTIVE, candidates, known={tacit.l2(): w}) for w in (0, 1)]
    tacit.stack(parts).save(folder / "equations")
    return folder / "equations"


def read_equations(folder):
    equations = tacit.Equations.load(folder / "equations")
    blocks = [({**vars(b), "factor": 0}, b.factor.tolist()) for b in equations.blocks]
    return equations.families, equations.names, equations.targets, equations.sources, blocks


def make_result(folder, name):
    run(folder)
    return folder / name


def read_result(folder):
    result = run(folder)  # reads what is finished
    return result.metadata, result.rows.to_dict("list")


def make_parts(folder, name):
    with pytest.raises(ZeroDivisionError):
        run(folder, failing_work)
    return next(folder.glob(name))


def read_parts(folder):
    result = run(folder)
    assert result.reused in (0, 2)
    return result.metadata, result.rows.to_dict("list")


SAVED = {
    "equations": (make_equations, read_equations),
    "run.json": (partial(make_result, name="run.json"), read_result),
    "rows": (partial(make_result, name="rows.parquet"), read_result),
    "a part": (partial(make_parts, name="parts/00001*"), read_parts),
    "run.json of an unfinished run": (partial(make_parts, name="run.json"), read_parts),
}


@pytest.mark.parametrize("name", SAVED)
def test_an_edited_file_is_refused_or_says_the_same(tmp_path, name):
    make, read = SAVED[name]
    original = tmp_path / "original"
    original.mkdir()
    path = make(original)
    shutil.copytree(original, tmp_path / "read")
    expected = read(tmp_path / "read")
    seeded, refused = random.Random(name), []
    for i in range(EDITS):
        content = edit_randomly(path.read_bytes(), seeded)
        folder = tmp_path / f"edited {i}"
        shutil.copytree(original, folder)
        (folder / path.relative_to(original)).write_bytes(content)
        try:
            assert str(read(folder)) == str(expected), content
        except tacit.InputError as error:
            refused.append(str(error))
        shutil.rmtree(folder)
    assert len(refused) > EDITS / 2  # the others edited blanks, or wrote what was there
    for message in refused:
        assert len(message.splitlines()) == 1
        assert path.name in message


KILL = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
import pandas, pyarrow.parquet  # imported once, and not in every child
from matplotlib.backends import backend_agg, backend_pdf, backend_svg
from support.damage import kill_often, run_together
kill_often(Path(sys.argv[1]), int(sys.argv[2]))
run_together(Path(sys.argv[1]) / "together", 4)
"""


@pytest.mark.slow
def test_sweeps_that_are_killed_or_run_together_end_with_the_same_rows(tmp_path):
    process = subprocess.run(  # a process of its own, which has no threads when it forks
        [sys.executable, "-c", KILL, str(tmp_path), str(KILLS)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    waiting = f"waiting for another run that writes to {tmp_path / 'together'}"
    assert {*process.stderr.split("\n")} == {"", waiting}
    whole = store.read_result(tmp_path / "whole")
    figures = [f"figure.{kind}" for kind in ("pdf", "png", "svg")]
    for name in ("killed", "together"):
        result = store.read_result(tmp_path / name)
        assert result.metadata == whole.metadata
        assert result.rows.equals(whole.rows)
        left = sorted(path.name for path in result.folder.rglob("*"))
        assert left == [*figures, "rows.parquet", "run.json"]
