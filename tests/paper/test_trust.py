"""The trust figure: its problems, its counts, its rows and drawing."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.experiments import run

from tacit.errors import ProblemKind
from tacit_paper import plots, trust
from tacit_paper.trust.cases import CASES, MISSPECIFIED, WELL_SPECIFIED
from tacit_paper.trust.checks import MINIMUM_REPLICATES, check, markdown_table, trust_table
from tacit_paper.trust.estimates import make_row

FAST = ("ridge and L1, asked for ridge", "padding counted as data")
ROOT = Path(__file__).parents[2]
STORED = ROOT / "results" / "paper" / "trust" / "rows.parquet"
OTHERS = [label for label in CASES if label not in FAST]


def make_rows(label, problems, listed=""):
    """Rows of one problem, one per entry of problems."""
    replicates = {"replicate": range(len(problems)), "problems": problems}
    numbers = {"truth": 0.01, "estimate": 0.01, "explained": 1.0}
    return pd.DataFrame({"problem": label, "listed": listed, **replicates, **numbers})


def test_ten_problems_are_well_specified_and_ten_list_a_kind():
    assert len(WELL_SPECIFIED) == len(MISSPECIFIED) == 10
    assert {case.listed for case in WELL_SPECIFIED.values()} == {""}
    assert {case.listed for case in MISSPECIFIED.values()} <= set(ProblemKind)
    assert list(trust.work(trust.QUICK, "cpu")) == list(CASES)
    assert trust.PAPER.replicates == 300 >= MINIMUM_REPLICATES


def test_a_row_depends_only_on_its_seed():
    tiny = replace(trust.QUICK, replicates=2)
    state = torch.random.get_rng_state()
    rows = pd.DataFrame(list(run(trust, tiny, finished=OTHERS)))
    assert torch.equal(state, torch.random.get_rng_state())
    assert rows.replicate.tolist() == [40_000, 40_001] * 2
    assert rows.groupby("problem").replicate.nunique().tolist() == [2, 2]
    expected = [make_row(label, seed) for label in FAST for seed in (40_000, 40_001)]
    pd.testing.assert_frame_equal(rows.drop(columns="unit"), pd.DataFrame(expected))
    assert rows.problems.tolist() == ["unexplained"] * 2 + ["objective"] * 2


@pytest.mark.slow
def test_processes_give_the_rows_of_one_process(monkeypatch):
    tiny = replace(trust.QUICK, replicates=2)
    alone = list(run(trust, tiny, finished=OTHERS))
    monkeypatch.setattr("tacit_paper.trust.estimates.FEW", 1)
    assert list(run(trust, tiny, finished=[*OTHERS, FAST[0]])) == alone[2:]


def test_the_table_counts_any_problem_or_the_listed_one():
    well = make_rows("ridge", ["", "", "weak", "no signal, weak"])
    missed = ["unexplained", "weak, unexplained", "weak", ""]
    rows = pd.concat([well, make_rows("missing", missed, "unexplained")], ignore_index=True)
    table = trust_table(rows)
    assert table.problem.tolist() == ["ridge", "missing"]
    assert table.reported.tolist() == [0.5, 0.5]
    assert table.silent.tolist() == [0.5, 0.25]
    assert "| missing | 0.01 | 0.01 | unexplained | 50.0% |" in markdown_table(rows)


@pytest.mark.parametrize(("alarms", "holds"), [(15, True), (16, False)])
def test_every_problem_is_checked_against_its_bound(alarms, holds):
    well = make_rows("ridge", ["weak"] * alarms + [""] * (300 - alarms))
    missing = make_rows("missing", ["noisy"] * 270 + ["weak"] * 30, "noisy")
    false_alarms, power = check(pd.concat([well, missing], ignore_index=True))
    assert (false_alarms.label, false_alarms.holds) == ("false alarms, ridge", holds)
    assert (power.label, power.holds, power.value) == ("power, missing: noisy", True, 0.9)


def test_few_replicates_are_checked_together_and_drawn(tmp_path):
    well = pd.concat([make_rows(label, [""]) for label in WELL_SPECIFIED])
    others = [make_rows(n, [str(c.listed)], str(c.listed)) for n, c in MISSPECIFIED.items()]
    rows = pd.concat([well, *others], ignore_index=True)
    assert [result.value for result in check(rows)] == [0, 1]
    assert all(result.holds for result in check(rows))
    for path in plots.save(trust.plot(rows), tmp_path):
        assert path.stat().st_size > 10_000


def test_the_table_in_the_docs_is_that_of_the_stored_rows():
    rows = pd.read_parquet(STORED)
    assert trust_table(rows).replicates.tolist() == [300] * 20
    assert markdown_table(rows) in (ROOT / "docs" / "reading-a-fit.md").read_text()
    assert [result.label for result in check(rows) if not result.holds] == []
