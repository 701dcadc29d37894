"""The coverage experiment: its problems, its counting, its rows, its figure."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from tacit.fitting.disagreement import MEASURED_EPOCHS as MEASURED
from tacit_paper import coverage as experiment
from tacit_paper import coverage_problems as problems
from tacit_paper import plots
from tacit_paper import training_coverage as training
from tacit_paper.coverage_check import ENOUGH, assessed, check, count_range, shares

TINY = replace(
    experiment.QUICK,
    replicates=3,
    examples=80,
    part=40,
    draws=8,
    many=32,
    steps=10,
    step_replicates=2,
    layers=4,
)


@pytest.fixture(scope="module")
def rows():
    return pd.DataFrame(list(experiment.run(TINY)))


def test_rows(rows):
    assert set(rows.unit) == set(experiment.units(TINY))
    assert set(rows.kind) == {"sampling", "draws", "steps", "layers"}
    assert ((rows.low <= rows.estimate) & (rows.estimate <= rows.high)).all()
    assert (rows.naive_error > 0).all()
    assert rows.groupby(["problem", "name"]).truth.nunique().max() == 1
    again = pd.DataFrame(list(experiment.run(TINY, finished=[*experiment.units(TINY)][:-1])))
    expected = rows[rows.unit == "layers"].reset_index(drop=True)[again.columns]
    pd.testing.assert_frame_equal(again, expected)


def test_the_figure_draws_from_rows_alone(rows, tmp_path):
    for path in plots.save(experiment.plot(rows), tmp_path):
        assert path.stat().st_size > 10_000
    assert [found.label for found in check(rows)] == ["covered, mean (too few replicates for more)"]


def test_shares_are_counted_as_they_should_be():
    estimates = [0.9, 1.0, 1.3, 1.0]
    table = pd.DataFrame(
        {
            "kind": "training", "problem": "p", "name": "l2", "truth": 1.0,
            "estimate": estimates,
            "low": [e - 0.2 for e in estimates],
            "high": [e + 0.2 for e in estimates],
            "naive_error": [0.06, 0.06, 0.06, 0.04],
        }
    )  # fmt: skip
    (row,) = shares(table).itertuples()
    assert (row.replicates, row.covered, row.naive) == (4, 0.75, 0.75)
    spread = pd.Series(estimates).std()
    assert row.wide == pytest.approx(0.2 / (1.959964 * spread), rel=1e-5)
    assert len(assessed(shares(table))) == 1
    assert not len(assessed(shares(table.assign(truth=0.01))))
    many = pd.concat([table] * 150, ignore_index=True)
    missed = {found.label: found.holds for found in check(many)}
    assert missed == {
        "training, λ₂: covered, least over cells": False,
        "training, λ₂: half-width over true, most": True,
    }


def test_the_range_of_a_count_is_wilsons():
    """Both ends solve |share − p| = z √(p(1−p)/n)."""
    for share, count in ((0.95, 600), (1.0, 20), (0.1, 7)):
        for end in count_range(share, count):
            away = 1.959964 * math.sqrt(max(end * (1 - end), 0) / count)
            assert abs(share - end) == pytest.approx(away, abs=1e-6)


def test_the_enumerated_dropout_is_the_limit_of_its_draws():
    few, many = problems.dropout(16), problems.dropout(512)
    truth = few.replicate(0).truth
    found = many.replicate(1).found
    low, high = found.intervals(0.999)["draws"]["l2"]
    assert low <= truth["l2"] <= high
    assert high - low < 0.02


def test_a_problem_is_the_same_whenever_it_is_made():
    state = torch.random.get_rng_state()
    one, other = (problems.regression(80, 40).replicate(7) for _ in range(2))
    assert one.truth == other.truth
    assert one.found.strengths == other.found.strengths
    assert torch.equal(state, torch.random.get_rng_state())


def test_networks_are_trained_anew_for_every_data_set():
    tiny = replace(training.QUICK, networks=2, networks_per_unit=1, epochs=6, cells=((1.0, 1.0),))
    assert training.units(tiny) == ["data sets from 20000", "data sets from 20001"]
    found = pd.DataFrame(list(training.run(tiny)))
    assert found.groupby("name").estimate.nunique().tolist() == [2, 2]
    later = pd.DataFrame(list(training.run(tiny, finished=training.units(tiny)[:1])))
    expected = found[found.unit == "data sets from 20001"].reset_index(drop=True)
    pd.testing.assert_frame_equal(later, expected)


def stored(name):
    root = Path(__file__).parents[2]
    return pd.read_parquet(root / "results" / "paper" / name / "rows.parquet")


def test_stored_rows_hold_what_the_docs_say():
    rows = stored("coverage")
    found = shares(rows)
    # First-order error bars miss a design that is itself mostly noise, and the check says so.
    failed = [key.label for key in check(rows) if not key.holds]
    assert len(check(rows)) == 6
    assert all(label.startswith("sampling, moving design") for label in failed)
    assert found.replicates.min() >= 500
    others = found[found.kind.isin(["steps", "layers"])]
    assert others.covered.between(0.92, 0.97).all()
    late = found[found.problem.str.contains("late")]
    # What the summary says of candidates that depend on the examples themselves.
    assert late.covered.min() == pytest.approx(0.89, abs=0.005)
    assert late.covered.max() == pytest.approx(0.98, abs=0.005)


def test_stored_training_rows_hold_what_the_docs_say():
    rows = stored("training-coverage")
    found = assessed(shares(rows))
    assert training.PAPER.networks >= ENOUGH
    assert len(check(rows)) == 4
    assert all(key.holds for key in check(rows))
    assert (found.naive < 0.3).all()
    # What the summary says of error bars from epochs.
    low, high = (int(part) for part in re.findall(r"\d+", MEASURED)[:2])
    assert round(100 * found.covered.min()) == low
    assert round(100 * found.covered.max()) == high


def test_the_table_of_the_docs_is_that_of_the_stored_rows():
    text = (Path(__file__).parents[2] / "docs" / "uncertainty.md").read_text()
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    table = [[cell.strip() for cell in line] for line in lines if len(line) == 6]
    found = shares(stored("coverage"))
    own = [line for line in table if line[0] in ("sampling", "draws", "steps", "layers")]
    assert len(own) == len(found)
    for line, row in zip(own, found.itertuples(), strict=True):
        assert line[1] == row.problem
        assert line[3:] == [f"{row.covered:.1%}", f"{row.naive:.0%}", f"{row.wide:.2f}"]
    training = assessed(shares(stored("training-coverage")))
    shown = [line for line in table if line[0] == "training"]
    ends = [end for line in shown for end in line[3].split(" to ")]
    assert len(shown) == 4
    assert f"{training.covered.min():.1%}" in ends
    assert f"{training.covered.max():.1%}" in ends
