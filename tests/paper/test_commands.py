"""The commands `list`, `reproduce`, `plot` and `claims`, and what an interrupted run leaves."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

import tacit
from tacit.cli import build_app
from tacit_paper import (
    EXPERIMENTS,
    Check,
    Claim,
    Evidence,
    commands,
    find_experiment,
    plots,
    store,
    verdicts,
)
from tacit_paper.commands import add_commands

# A shell may start this test with SIGINT ignored, which child processes inherit.
TACIT_WITH_SIGINT = (
    "import signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from tacit.__main__ import main\n"
    "main()"
)


def invoke(*arguments):
    return CliRunner().invoke(build_app([add_commands]), [str(argument) for argument in arguments])


def reproduce(name, out, *options):
    return invoke("reproduce", name, "--out", out, "--device", "cpu", *options)


def test_every_experiment_is_listed():
    result = invoke("list")
    assert result.exit_code == 0
    for name in EXPERIMENTS:
        assert name in result.output


WRONG_CALLS = {
    ("reproduce", "nope"): "experiment is 'nope': pass one of 'tradeoff'",
    ("reproduce", "--preset", "huge"): "preset is 'huge': pass one of 'quick', 'paper'",
    ("reproduce", "--device", "tpu"): "device is 'tpu': pass one of 'auto'",
    ("reproduce", "tradeoff", "--out", "{file}/below"): "another --out",
    ("plot", "{empty}"): "run tacit reproduce first",
    ("plot", "{missing}"): "run tacit reproduce first",
}


@pytest.mark.parametrize("arguments", WRONG_CALLS, ids=" ".join)
def test_a_wrong_call_is_one_line_and_exit_code_two(arguments, tmp_path):
    paths = {name: tmp_path / name for name in ("file", "empty", "missing")}
    paths["file"].write_text("")
    paths["empty"].mkdir()
    result = invoke(*(argument.format(**paths) for argument in arguments))
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert WRONG_CALLS[arguments] in line


def test_missing_packages_are_named_with_the_extra_that_installs_them(monkeypatch):
    monkeypatch.setattr(
        commands, "find_spec", lambda name: None if name == "pyarrow" else "installed"
    )
    for arguments in (["list"], ["reproduce", "tradeoff"], ["plot", "."], ["claims"]):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert "pyarrow" in result.stderr
        assert "pip install 'tacit[paper]'" in result.stderr


def test_a_damaged_result_is_reported_in_one_line_and_not_overwritten(tmp_path):
    assert reproduce("tradeoff", tmp_path).exit_code == 0
    path = tmp_path / "quick" / "tradeoff" / "rows.parquet"
    path.write_bytes(b"damaged")
    for result in (reproduce("tradeoff", tmp_path), invoke("plot", tmp_path)):
        assert result.exit_code == 2
        (line,) = result.stderr.strip().splitlines()
        assert "rows.parquet is damaged" in line
    assert path.read_bytes() == b"damaged"
    assert reproduce("tradeoff", tmp_path, "--force").exit_code == 0


def test_plot_writes_the_page_where_reproduce_does(tmp_path, monkeypatch):
    out = tmp_path / "out"
    reproduce("tradeoff", out)
    page = (out / "index.html").read_text()
    monkeypatch.setattr(plots, "draw", lambda result: [])  # the figures are there
    for given in ("out", "out/quick", "out/quick/tradeoff", "out/quick/../quick"):
        monkeypatch.chdir(tmp_path)
        (out / "index.html").unlink()
        result = invoke("plot", given)
        assert (out / "index.html").read_text() == page
        shown = "out/index.html" if given == "out" else out / "index.html"
        assert f"page: {shown}" in result.output, result.output
    monkeypatch.chdir(out / "quick" / "tradeoff")
    assert f"page: {out / 'index.html'}" in invoke("plot", ".").output
    shutil.copytree(out / "quick" / "tradeoff", tmp_path / "elsewhere" / "copy")
    assert "page: copy/index.html" in invoke_in(tmp_path / "elsewhere", monkeypatch, "plot", "copy")
    assert "page: index.html" in invoke_in(tmp_path / "elsewhere", monkeypatch, "plot", ".")


def invoke_in(folder, monkeypatch, *arguments):
    monkeypatch.chdir(folder)
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_key_number_that_is_not_met_says_what_failed(tmp_path, monkeypatch):
    experiment = find_experiment("tradeoff")
    checks = [Check("first", 2.0, "≤ 1", False, "protocol"), Check("second", 2.0, "≤ 1", False)]
    monkeypatch.setattr(experiment, "check", lambda rows: checks)
    output = reproduce("tradeoff", tmp_path).output
    assert "no: the paper's protocol · first: 2 (expected ≤ 1)" in output
    assert "no: our expectation · second: 2" in output
    assert "no: our expectation" in (tmp_path / "index.html").read_text()


def test_claims_are_printed_with_the_numbers_of_rows(tmp_path, monkeypatch):
    def measure(rows):
        return Evidence(f"{len(rows)} rows counted", agrees=True)

    claim = Claim("The sky is blue.", "Figure 1", "holds", measure, "By day.")
    monkeypatch.setattr(find_experiment("tradeoff"), "CLAIMS", [claim])
    monkeypatch.setattr(verdicts, "EXPERIMENTS", ("tradeoff",))
    assert "1 claim: 1 has no rows here." in invoke("claims", tmp_path).output
    reproduce("tradeoff", tmp_path)
    shown = invoke("claims", tmp_path).output.splitlines()
    assert shown[0].split(maxsplit=1) == ["holds", "The sky is blue. (Figure 1)"]
    assert [line.strip() for line in shown[1:]] == [
        "82 rows counted", "By day.", "1 claim: 1 holds.",
    ]  # fmt: skip


def test_plot_draws_the_same_figures_again_from_rows(tmp_path):
    reproduce("tradeoff", tmp_path)
    folder = tmp_path / "quick" / "tradeoff"
    figures = {kind: (folder / f"figure.{kind}").read_bytes() for kind in ("svg", "pdf", "png")}
    for kind in figures:
        (folder / f"figure.{kind}").unlink()
    assert invoke("plot", folder).exit_code == 0
    for kind, content in figures.items():
        assert (folder / f"figure.{kind}").read_bytes() == content


def test_the_page_draws_an_incomplete_figure_again(tmp_path):
    reproduce("tradeoff", tmp_path)
    figure = tmp_path / "quick" / "tradeoff" / "figure.svg"
    complete = figure.read_bytes()
    figure.write_bytes(complete[:100])
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text("{}")
    result = reproduce("trajectory-deviations", tmp_path)
    assert result.exit_code == 0, result.output
    assert figure.read_bytes() == complete


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen", "note"),
    [(True, True, "cuda", ""), (False, True, "cpu", "float64"), (False, False, "cpu", "")],
)
def test_auto_chooses_cuda_then_mps_then_cpu(monkeypatch, cuda, mps, chosen, note):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    device, device_note = commands.choose_device("auto")
    assert device == chosen
    assert note in device_note
    if not cuda:
        with pytest.raises(tacit.InputError, match=r"'cuda' is not available .*cpu"):
            commands.choose_device("cuda")


MANY_SHORT_UNITS = "trajectory-deviations"
"""An experiment of forty short units, which can be interrupted between any two."""


def start_run(out):
    command = ["reproduce", MANY_SHORT_UNITS, "--out", str(out), "--device", "cpu"]
    return subprocess.Popen(
        [sys.executable, "-c", TACIT_WITH_SIGINT, *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_parts(folder, count, seconds=90):
    deadline = time.monotonic() + seconds
    while len(list(folder.glob("*.parquet"))) < count:
        assert time.monotonic() < deadline, "no rows in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def uninterrupted_rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    experiment = find_experiment(MANY_SHORT_UNITS)
    return store.run_experiment(MANY_SHORT_UNITS, experiment, "quick", folder).rows


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_ends_the_same(tmp_path, uninterrupted_rows):
    """By Ctrl-C; runs that are killed are in test_soak."""
    process = start_run(tmp_path)
    folder = tmp_path / "quick" / MANY_SHORT_UNITS
    wait_for_parts(folder / "parts", 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "finished rows are kept" in errors
    assert "Traceback" not in errors
    experiment = find_experiment(MANY_SHORT_UNITS)
    parts = list((folder / "parts").glob("*.parquet"))
    assert 2 <= len(parts) < len(experiment.work(experiment.QUICK, "cpu"))
    second = start_run(tmp_path)
    output, errors = second.communicate(timeout=300)
    assert second.returncode == 0, errors
    assert "of them reused" in output
    resumed_rows = store.read_result(folder).rows
    times = [name for name in uninterrupted_rows.columns if name.endswith("_seconds")]
    assert resumed_rows.drop(columns=times).equals(uninterrupted_rows.drop(columns=times))
