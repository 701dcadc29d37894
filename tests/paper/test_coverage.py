"""The coverage figures: their cases, their counts, their rows and drawings."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.experiments import run

from tacit.fitting.error_bars import EPOCH_COVERAGE
from tacit_paper import coverage, plots, training_coverage
from tacit_paper.coverage import cases
from tacit_paper.coverage.checks import (
    MINIMUM_REPLICATES,
    check,
    coverage_table,
    wilson_interval,
    with_promised_coverage,
)

TINY = replace(
    coverage.QUICK,
    replicates=3,
    examples=80,
    part=40,
    draws=8,
    many=32,
    steps=10,
    step_replicates=2,
    layers=4,
)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    return pd.DataFrame(list(run(coverage, TINY)))


def read_stored_rows(name):
    return pd.read_parquet(ROOT / "results" / "paper" / name / "rows.parquet")


def test_rows_have_an_interval_around_every_estimate(rows):
    assert set(rows.unit) == set(coverage.work(TINY, "cpu"))
    assert set(rows.kind) == {"sampling", "draws", "steps", "layers"}
    assert ((rows.low <= rows.estimate) & (rows.estimate <= rows.high)).all()
    assert (rows.naive_error > 0).all()
    assert rows.groupby(["problem", "name"]).truth.nunique().max() == 1


def test_a_subset_of_units_gives_the_same_rows(rows):
    subset = pd.DataFrame(list(run(coverage, TINY, finished=list(coverage.work(TINY, "cpu"))[:-1])))
    expected = rows[rows.unit == "layers"].reset_index(drop=True)[subset.columns]
    pd.testing.assert_frame_equal(subset, expected)


def test_the_figure_is_drawn_from_the_rows(rows, tmp_path):
    for path in plots.save(coverage.plot(rows), tmp_path):
        assert path.stat().st_size > 10_000
    labels = [result.label for result in check(rows)]
    assert labels == ["mean coverage (too few replicates for more)"]


def test_the_coverage_table_counts_intervals_that_contain_the_truth():
    estimates = [0.9, 1.0, 1.3, 1.0]
    replicates = pd.DataFrame(
        {
            "kind": "training", "problem": "p", "name": "l2", "truth": 1.0,
            "estimate": estimates,
            "low": [e - 0.2 for e in estimates],
            "high": [e + 0.2 for e in estimates],
            "naive_error": [0.06, 0.06, 0.06, 0.04],
        }
    )  # fmt: skip
    (row,) = coverage_table(replicates).itertuples()
    assert (row.replicates, row.covered, row.naive) == (4, 0.75, 0.75)
    spread = pd.Series(estimates).std()
    assert row.wide == pytest.approx(0.2 / (1.959964 * spread), rel=1e-5)
    assert len(with_promised_coverage(coverage_table(replicates))) == 1
    assert not len(with_promised_coverage(coverage_table(replicates.assign(truth=0.01))))
    many = pd.concat([replicates] * 150, ignore_index=True)
    assert {result.label: result.holds for result in check(many)} == {
        "training, λ₂: lowest coverage over cells": False,
        "training, λ₂: half-width over that of the true spread, highest": True,
    }


def test_the_interval_of_a_count_is_wilsons():
    """Both ends p solve |fraction − p| = z √(p(1−p)/n)."""
    for fraction, count in ((0.95, 600), (1.0, 20), (0.1, 7)):
        for end in wilson_interval(fraction, count):
            distance = 1.959964 * math.sqrt(max(end * (1 - end), 0) / count)
            assert abs(fraction - end) == pytest.approx(distance, abs=1e-6)


def test_dropout_by_enumeration_is_the_limit_of_its_draws():
    few, many = cases.dropout(16), cases.dropout(512)
    low, high = many.replicate(1).intervals(0.999)["draws"]["l2"]
    assert few.truth == many.truth
    assert low <= few.truth["l2"] <= high
    assert high - low < 0.02


def test_a_case_is_the_same_whenever_it_is_made():
    state = torch.random.get_rng_state()
    first, second = (cases.regression(80, 40) for _ in range(2))
    assert first.truth == second.truth
    assert first.replicate(7).strengths == second.replicate(7).strengths
    assert torch.equal(state, torch.random.get_rng_state())


def test_every_data_set_has_newly_trained_networks():
    tiny = replace(
        training_coverage.QUICK, networks=2, networks_per_unit=1, epochs=6, cells=((1.0, 1.0),)
    )
    units = list(training_coverage.work(tiny, "cpu"))
    assert units == ["data sets from 20000", "data sets from 20001"]
    rows = pd.DataFrame(list(run(training_coverage, tiny)))
    assert rows.groupby("name").estimate.nunique().tolist() == [2, 2]
    subset = pd.DataFrame(list(run(training_coverage, tiny, finished=units[:1])))
    expected = rows[rows.unit == "data sets from 20001"].reset_index(drop=True)
    pd.testing.assert_frame_equal(subset, expected)


def test_stored_rows_agree_with_the_docs():
    rows = read_stored_rows("coverage")
    table = coverage_table(rows)
    # First-order error bars miss a design that is mostly noise itself, and the check says so.
    failed = [result.label for result in check(rows) if not result.holds]
    assert len(check(rows)) == 6
    assert all(label.startswith("sampling, moving design") for label in failed)
    assert table.replicates.min() >= 500
    unchecked = table[table.kind.isin(["steps", "layers"])]
    assert unchecked.covered.between(0.92, 0.97).all()
    # The summary quotes these numbers for candidates that depend on the examples themselves.
    late = table[table.problem.str.contains("late")]
    assert late.covered.min() == pytest.approx(0.89, abs=0.005)
    assert late.covered.max() == pytest.approx(0.98, abs=0.005)


def test_stored_training_rows_agree_with_the_docs():
    rows = read_stored_rows("training-coverage")
    table = with_promised_coverage(coverage_table(rows))
    assert training_coverage.PAPER.networks >= MINIMUM_REPLICATES
    assert len(check(rows)) == 4
    assert all(result.holds for result in check(rows))
    assert (table.naive < 0.3).all()
    # The summary quotes these numbers for error bars from epochs.
    low, high = (int(number) for number in re.findall(r"\d+", EPOCH_COVERAGE)[:2])
    assert round(100 * table.covered.min()) == low
    assert round(100 * table.covered.max()) == high


def test_the_table_in_the_docs_is_that_of_the_stored_rows():
    text = (ROOT / "docs" / "uncertainty.md").read_text()
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    docs_table = [[cell.strip() for cell in line] for line in lines if len(line) == 6]
    kinds = ("sampling", "draws", "steps", "layers")
    docs_rows = [line for line in docs_table if line[0] in kinds]
    table = coverage_table(read_stored_rows("coverage"))
    assert len(docs_rows) == len(table)
    for line, row in zip(docs_rows, table.itertuples(), strict=True):
        assert line[1] == row.problem
        assert line[3:] == [f"{row.covered:.1%}", f"{row.naive:.0%}", f"{row.wide:.2f}"]
    training = with_promised_coverage(coverage_table(read_stored_rows("training-coverage")))
    docs_rows = [line for line in docs_table if line[0] == "training"]
    ends = [end for line in docs_rows for end in line[3].split(" to ")]
    assert len(docs_rows) == 4
    assert f"{training.covered.min():.1%}" in ends
    assert f"{training.covered.max():.1%}" in ends
