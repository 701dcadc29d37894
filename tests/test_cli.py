"""The command line does what it says, and a wrong call is one line and exit code 2."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tacit
from tacit import cli
from tacit_paper import MODULES, load, store

TACIT = [sys.executable, "-c", "from tacit.cli import main; main()"]
MODULE = """
import torch, tacit

def objective():
    torch.manual_seed(0)
    X, y = torch.randn(50, 4).double(), torch.randn(50, 1).double()
    model = torch.nn.Linear(4, 1, bias=False).double()
    gram = X.T @ X / 50 + 0.1 * torch.eye(4).double()
    model.weight.data = torch.linalg.solve(gram, X.T @ y / 50).T
    return tacit.Objective(model, torch.nn.functional.mse_loss, (X, y))

def number():
    return 3

def needy(data):
    return objective()
"""


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def test_every_experiment_is_listed():
    found = invoke("list")
    assert found.exit_code == 0
    for name in MODULES:
        assert name in found.output


def test_estimate_prints_the_summary_and_writes_json(module):
    found = invoke(
        "estimate", "mine:objective", "--with", "l2", "--with", "smooth_l1:beta=1e-3,name=lasso",
        "--known", "l2=0.04", "--json", module / "fit.json",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "explained 1.0000" in found.output
    plain = json.loads((module / "fit.json").read_text())
    assert plain["strengths"] == pytest.approx({"l2": 0.06, "lasso": 0}, abs=1e-10)
    assert plain["sources"][0]["known"] == {"l2": 0.04}


def test_every_candidate_can_be_written(module):
    for spec in ("l1", "group_l2:scope=weight", "layerwise:l2", "diagonal", "gradient_norm"):
        found = invoke("estimate", "mine:objective", "--with", spec, "--nonnegative")
        assert found.exit_code == 0, found.output


WRONG = {
    ("reproduce", "nope"): "no experiment 'nope': there are tradeoff",
    ("reproduce", "--preset", "huge"): "no preset 'huge': there are quick, paper",
    ("reproduce", "--device", "tpu"): "no device 'tpu': there are auto",
    ("reproduce", "tradeoff", "--out", "{file}/below"): "cannot be written to",
    ("plot", "{empty}"): "holds no finished results",
    ("plot", "{missing}"): "holds no finished results",
    ("estimate", "mine", "--with", "l2"): "write it as module:callable",
    ("estimate", "nowhere:x", "--with", "l2"): "No module named 'nowhere'",
    ("estimate", "mine:nothing", "--with", "l2"): "has no callable 'nothing'",
    ("estimate", "mine:number", "--with", "l2"): "returned a int: return a tacit.Objective",
    ("estimate", "./mine.py:objective", "--with", "l2"): "Write module:callable",
    ("estimate", "mine:needy", "--with", "l2"): "must need no arguments",
    ("estimate", "mine:objective", "--with", "l2", "--json", "."): "cannot be written",
    ("estimate", "mine:objective", "--with", "smooth_l1:beta=1,beta=2"): "an option twice",
    ("estimate", "mine:objective", "--with", "l3"): "no regularizer 'l3'",
    ("estimate", "mine:objective", "--with", "smooth_l1"): "missing 1 required",
    ("estimate", "mine:objective", "--with", "smooth_l1:beta=x"): "beta is 'x'",
    ("estimate", "mine:objective", "--with", "smooth_l1:beta=-1"): "beta is -1.0",
    ("estimate", "mine:objective", "--with", "l2:width=3"): "is no option",
    ("estimate", "mine:objective", "--with", "l2", "--with", "l2"): "several regularizers",
    ("estimate", "mine:objective", "--with", "l2", "--known", "l2"): "write it as l2=5e-5",
    ("estimate", "mine:objective", "--with", "l2", "--json", "{file}/x"): "cannot be written",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_a_wrong_call_is_one_line_and_exit_code_two(arguments, module):
    (module / "file").write_text("")
    (module / "empty").mkdir()
    places = {"file": module / "file", "empty": module / "empty", "missing": module / "none"}
    found = invoke(*(argument.format(**places) for argument in arguments))
    assert found.exit_code == 2, found.output
    lines = found.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert WRONG[arguments] in lines[0]
    assert "Traceback" not in found.output


def test_a_damaged_result_is_reported_in_one_line_and_kept(tmp_path):
    assert invoke("reproduce", "tradeoff", "--out", tmp_path, "--device", "cpu").exit_code == 0
    path = tmp_path / "quick" / "tradeoff" / "rows.parquet"
    path.write_bytes(b"damaged")
    for command in (
        ["reproduce", "tradeoff", "--out", tmp_path, "--device", "cpu"],
        ["plot", tmp_path],
    ):
        found = invoke(*command)
        assert found.exit_code == 2
        assert "rows.parquet is damaged" in found.stderr
        assert len(found.stderr.strip().splitlines()) == 1
    assert path.read_bytes() == b"damaged"
    forced = invoke("reproduce", "tradeoff", "--out", tmp_path, "--force", "--device", "cpu")
    assert forced.exit_code == 0


def test_figures_are_drawn_again_from_rows_alone(tmp_path):
    invoke("reproduce", "tradeoff", "--out", tmp_path, "--device", "cpu")
    folder = tmp_path / "quick" / "tradeoff"
    figures = {kind: (folder / f"figure.{kind}").read_bytes() for kind in ("svg", "pdf", "png")}
    for kind in figures:
        (folder / f"figure.{kind}").unlink()
    assert invoke("plot", folder).exit_code == 0
    for kind, content in figures.items():
        assert (folder / f"figure.{kind}").read_bytes() == content


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen", "note"),
    [(True, True, "cuda", ""), (False, True, "cpu", "no float64"), (False, False, "cpu", "")],
)
def test_auto_takes_cuda_then_mps_then_cpu(monkeypatch, cuda, mps, chosen, note):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    place, said = cli.choose_device("auto")
    assert place == chosen
    assert note in said
    if not cuda:
        with pytest.raises(tacit.InputError, match=r"'cuda' is not available here: there is"):
            cli.choose_device("cuda")


def start(out):
    return subprocess.Popen(
        [*TACIT, "reproduce", "early-stopping", "--out", str(out), "--device", "cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_parts(parts, count, seconds=90):
    end = time.monotonic() + seconds
    while len(list(parts.glob("*.parquet")) if parts.exists() else []) < count:
        assert time.monotonic() < end, "no rows in time"
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_goes_on_and_ends_the_same(tmp_path, how):
    process = start(tmp_path / "killed")
    folder = tmp_path / "killed" / "quick" / "early-stopping"
    wait_for_parts(folder / "parts", 2)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how), errors
    if how == signal.SIGINT:
        assert "finished rows are kept" in errors
        assert "Traceback" not in errors
    left = len(list((folder / "parts").glob("*.parquet")))
    assert 2 <= left < len(load("early-stopping").units(load("early-stopping").QUICK))
    again = start(tmp_path / "killed")
    output, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert "of them reused" in output
    whole = whole_run()
    resumed = store.read(folder)
    times = [name for name in whole.columns if name.endswith("_seconds")]
    assert resumed.rows.drop(columns=times).equals(whole.drop(columns=times))


def whole_run():
    """The rows of an uninterrupted run, made once."""
    if not hasattr(whole_run, "rows"):
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            result = store.execute(
                "early-stopping", load("early-stopping"), "quick", Path(folder) / "whole"
            )
        whole_run.rows = result.rows
    return whole_run.rows


def test_a_missing_figure_is_drawn_again_for_the_page(tmp_path):
    invoke("reproduce", "tradeoff", "--out", tmp_path, "--device", "cpu")
    figure = tmp_path / "quick" / "tradeoff" / "figure.svg"
    before = figure.read_bytes()
    figure.write_bytes(before[:100])
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text("{}")
    again = invoke("reproduce", "trajectory-deviations", "--out", tmp_path, "--device", "cpu")
    assert again.exit_code == 0, again.output
    assert figure.read_bytes() == before
