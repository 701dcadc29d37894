"""Figures as jobs of Snakemake, on this machine and on a SLURM of one node, with kills."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.pages import ROOT
from support.slurm import one_node_slurm, run, wait_for, why_not

from tacit_paper import find_experiment, store

FIGURES = ("tradeoff", "step-size")
SOON = ("--seconds-between-status-checks=1", "--slurm-init-seconds-before-status-checks=1")
SMALL = ("--default-resources", "mem_mb=1500", "cpus_per_task=1", "runtime=10")


def snakemake(folder, profile, *options, figures=FIGURES, config=()):
    """Begin Snakemake in a folder, with the profile of the project."""
    command = [
        sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "workflow/Snakefile"),
        "--profile", str(ROOT / "workflow/profiles" / profile), "--directory", str(folder),
        *options, "--config", f"figures={','.join(figures)}", *config,
    ]  # fmt: skip
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def finish(process, folder):
    log = folder.parent / f"{folder.name}.log"
    assert process.wait(300) == 0, log.read_text()[-5000:]
    return log.read_text()


def marks(folder):
    return sorted(path.name for path in (folder / "results/jobs").rglob("*-*") if path.is_file())


def rows_in_one_process(figure, folder):
    experiment = find_experiment(figure)
    return store.run_experiment(figure, experiment, "quick", folder / figure).rows


@pytest.mark.slow
def test_jobs_on_this_machine_end_with_the_rows_of_one_process(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    finish(snakemake(folder, "local", figures=["tradeoff"]), folder)
    result = store.read_result(folder / "results/quick/tradeoff")
    assert result.rows.equals(rows_in_one_process("tradeoff", tmp_path))
    assert (folder / "results/index.html").exists()
    assert marks(folder) == ["0-1", "1-2"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_jobs_for_gpus_are_planned_on_a_machine_without_one(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    log = finish(snakemake(folder, "slurm", "--dry-run", config=["device=cuda"]), folder)
    for rule in ("rule units", "rule figure", "rule page"):
        assert rule in log


@pytest.fixture
def slurm(tmp_path):
    reason = why_not()
    if os.environ.get("TACIT_REQUIRE_SLURM") != "1":
        pytest.skip(f"TACIT_REQUIRE_SLURM is not 1{reason and f': {reason}'}")
    assert not reason
    with one_node_slurm(tmp_path / "slurm"):
        yield


@pytest.mark.slow
def test_jobs_of_slurm_that_are_killed_end_with_the_rows_of_one_process(tmp_path, slurm):
    folder = tmp_path / "work"
    folder.mkdir()
    first = snakemake(folder, "slurm", *SOON, *SMALL)
    wait_for(lambda: running_jobs("step-size"), "a job", 120)
    killed = running_jobs("step-size")[0]
    run("scancel", "--signal=KILL", "--full", killed)
    wait_for(lambda: killed not in running_jobs(), "the end of the killed job")
    wait_for(lambda: marks(folder), "a finished unit", 120)
    first.kill()  # -9: Snakemake cannot clean up
    first.wait()
    before = marks(folder)
    assert len(before) < 5  # it was in the middle

    finish(snakemake(folder, "slurm", "--unlock"), folder)
    finish(snakemake(folder, "slurm", *SOON, *SMALL), folder)
    assert len(marks(folder)) == 5
    for figure in FIGURES:
        result = store.read_result(folder / "results/quick" / figure)
        one_process = rows_in_one_process(figure, tmp_path)
        measured = [name for name in one_process if name.endswith(store.MEASURED)]
        assert result.rows.drop(columns=measured).equals(one_process.drop(columns=measured))
    again = finish(snakemake(folder, "slurm", *SOON, *SMALL), folder)
    assert "rule units" not in again.rsplit("Building DAG", 1)[1]  # nothing is computed twice


def running_jobs(figure=""):
    """Numbers of SLURM's jobs that run now, by what their comment or name says."""
    listed = run("squeue", "--noheader", "--states=RUNNING", "--format=%i %k").splitlines()
    time.sleep(0.1)
    return [line.split()[0] for line in listed if figure in line]
