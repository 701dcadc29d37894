"""Units of a figure that several processes compute, each some of them, end with the same rows."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.toy_experiment import Config, run, toy_experiment
from typer.testing import CliRunner

from tacit import InputError
from tacit.cli import build_app
from tacit_paper import store
from tacit_paper.commands import add_commands


def run_units(folder, experiment, first, end):
    return store.run_units("toy", experiment, "quick", folder, slice(first, end))


def test_units_computed_apart_and_in_any_order_give_the_rows_of_one_run(tmp_path):
    whole = run(tmp_path / "whole", toy_experiment())
    for first, end in [(3, 4), (0, 2), (1, 3)]:
        assert run_units(tmp_path / "apart", toy_experiment(), first, end) == (end - first, 4)
    calls = []
    joined = run(tmp_path / "apart", toy_experiment(calls=calls))
    assert calls == []
    assert joined.rows.equals(whole.rows)
    assert joined.metadata == whole.metadata


def test_units_computed_at_once_give_the_rows_of_one_run(tmp_path):
    config = Config(pieces=12)
    whole = run(tmp_path / "whole", toy_experiment(config))
    with ThreadPoolExecutor(6) as pool:
        jobs = [
            pool.submit(run_units, tmp_path / "apart", toy_experiment(config), i, i + 2)
            for i in range(0, 12, 2)
        ]
    assert [job.result() for job in jobs] == [(2, 12)] * 6
    assert run(tmp_path / "apart", toy_experiment(config)).rows.equals(whole.rows)


def test_units_that_were_interrupted_are_computed_again_and_no_others(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_units(tmp_path, toy_experiment(fail_at="piece 1"), 0, 3)
    calls = []
    run_units(tmp_path, toy_experiment(calls=calls), 0, 3)
    assert calls == ["piece 1", "piece 2"]


def test_units_of_a_finished_figure_are_not_computed_again(tmp_path):
    run(tmp_path, toy_experiment())
    calls = []
    assert run_units(tmp_path, toy_experiment(calls=calls), 0, 2) == (2, 4)
    assert calls == []


def test_the_last_end_may_be_beyond_the_units_and_the_first_may_not(tmp_path):
    assert run_units(tmp_path, toy_experiment(), 2, None) == (2, 4)
    assert run_units(tmp_path, toy_experiment(), 2, 90) == (2, 4)
    with pytest.raises(InputError, match="it has 4: their numbers are 0 to 3"):
        run_units(tmp_path, toy_experiment(), 4, 8)


def test_a_unit_is_not_written_into_a_folder_that_another_run_took(tmp_path):
    def other_run_begins(config, device):
        work = toy_experiment().work(config, device)

        def rows():
            run(tmp_path, toy_experiment(Config(factor=2.0)))
            yield {"value": 1.0}

        return {**work, "piece 0": rows}

    experiment = toy_experiment()
    experiment.work = other_run_begins
    with pytest.raises(InputError, match="taken by a run with other settings"):
        run_units(tmp_path, experiment, 0, 1)
    assert (run(tmp_path, toy_experiment(Config(factor=2.0))).rows["value"].dropna() % 2 == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tradeoff", "--units", "1"], "pass A:B"),
        (["tradeoff", "--units", "b:a"], "pass A:B"),
        (["tradeoff", "--units", "2:2"], "pass A:B"),
        (["tradeoff", "--units", "5:6"], "it has 2: their numbers are 0 to 1"),
        (["tradeoff", "laws", "--units", "0:1"], "name one figure"),
        (["--units", "0:1"], "name one figure"),
        (["tradeoff", "--force", "--units", "0:1"], "--force"),
    ],
)
def test_wrong_units_are_refused(tmp_path, arguments, message):
    result = CliRunner().invoke(
        build_app([add_commands]), ["reproduce", *arguments, "--out", str(tmp_path)]
    )
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.slow
def test_the_command_computes_units_and_then_the_figure(tmp_path):
    def reproduce(*options):
        command = [sys.executable, "-m", "tacit", "reproduce", "tradeoff", "--out", str(tmp_path)]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "units 1 to 1 of 0 to 1 are finished" in reproduce("--units", "1:")
    assert not (tmp_path / "index.html").exists()
    assert "reused" in reproduce()
    assert (tmp_path / "quick" / "tradeoff" / "figure.svg").exists()
