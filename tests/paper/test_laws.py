"""The bench of known laws. The quick reproduction checks all of them; here are its parts."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from support.experiments import run

from tacit_paper import laws, plots
from tacit_paper.laws import SECTIONS
from tacit_paper.laws.checks import LAWS, check, law_table, markdown_table
from tacit_paper.laws.law import law_rows, laws_in

ROOT = Path(__file__).parents[2]
STORED = ROOT / "results" / "paper" / "laws" / "rows.parquet"
ALL = [law for module in SECTIONS.values() for law in laws_in(module)]


@pytest.fixture(scope="module")
def stored():
    return pd.read_parquet(STORED)


def make_rows(ratios, *, low=float("nan"), high=float("nan"), order=0.0, problems=""):
    """Rows of one law without a name, by the value of its parameter."""
    text = dict.fromkeys(("section", "law", "technique", "term", "source", "parameter"), "")
    return pd.DataFrame(
        {
            **text, "equations": "endpoint", "value": value, "at_limit": value == min(ratios),
            "order": order, "seed": 0, "ratio": ratio, "low": low, "high": high,
            "explained": 1.0, "problems": problems,
        }
        for value, ratio in ratios.items()
    )  # fmt: skip


def test_every_law_is_a_unit_with_a_name_and_a_source():
    assert len({law.name for law in ALL}) == len(ALL) == LAWS
    assert list(laws.work(laws.QUICK, "cpu")) == [law.name for law in ALL]
    for law in ALL:
        assert law.technique
        assert law.source
        assert law.estimate.__doc__
        assert all("·" in term or "½" in term for term in law.terms.values())
        assert list(law.values) == sorted(law.values, reverse=True)
        assert bool(law.order) == (len(law.values) > 2)


@pytest.mark.parametrize(
    ("rows", "recovered"),
    [
        (make_rows({0.1: 1.009}), True),
        (make_rows({0.1: 1.011}), False),
        (make_rows({0.1: 1.05}, low=0.99, high=1.11), True),
        (make_rows({0.1: 1.05}, low=1.01, high=1.09), False),
        (make_rows({0.2: 1.2, 0.1: 1.004}), True),  # only the limit counts
    ],
)
def test_a_law_is_recovered_within_a_percent_or_in_its_interval(rows, recovered):
    assert law_table(rows).recovered.tolist() == [recovered]


NAN = float("nan")


def failed_checks(*seeds):
    """The labels of checks that fail on these rows, each of another seed."""
    rows = pd.concat([rows.assign(seed=seed) for seed, rows in enumerate(seeds)])
    return {c.label for c in check(rows) if not c.holds}


@pytest.mark.parametrize(
    "odd",
    [
        make_rows({0.1: NAN}),
        make_rows({0.1: NAN}, low=0.95, high=1.05),
        make_rows({0.1: 1.05}, low=NAN, high=NAN),
        make_rows({0.1: 1.05}, low=0.95, high=NAN),
    ],
)
def test_what_is_not_a_number_in_one_seed_is_not_recovered(odd):
    """Means of tables leave such numbers out."""
    label = "terms within 1 %, or inside their interval"
    usual = make_rows({0.1: 1.0}, low=0.95, high=1.05)
    assert label not in failed_checks(usual, usual)
    assert label in failed_checks(usual, usual, usual, odd)
    exact = make_rows({0.1: 1.0})
    assert label not in failed_checks(exact, exact)
    assert label in failed_checks(exact, exact, make_rows({0.1: NAN}))


def test_wide_intervals_and_problems_and_unexplained_parts_fail():
    wide = make_rows({0.1: 1.0}, low=-float("inf"), high=float("inf"))
    assert "largest half-width of an interval" in failed_checks(wide)
    elsewhere = make_rows({0.2: 1.0, 0.1: 1.0})
    elsewhere.loc[0, "problems"] = "no signal"  # not at the limit
    assert "fits with a Problem" in failed_checks(elsewhere)
    for explained in (0.5, NAN):
        part = make_rows({0.1: 1.0}).assign(explained=explained)
        assert "least part explained" in failed_checks(make_rows({0.1: 1.0}), part)


def test_every_seed_has_the_order():
    """A seed with large errors would hide those of the others in their mean."""
    right = make_rows({h: 1 + 3 * h for h in (0.04, 0.02, 0.01)}, order=1.0)
    wrong = make_rows({h: 1 + h**2 for h in (0.04, 0.02, 0.01)}, order=1.0)
    unknown = make_rows({0.04: 1.04, 0.02: 1.02, 0.01: NAN}, order=1.0)
    label = "largest error of an order of convergence"
    assert law_table(pd.concat([right, wrong])).slope[0] == pytest.approx(1, abs=0.1)
    assert label not in failed_checks(right, right)
    assert label in failed_checks(right, wrong)
    assert "orders that could not be measured" in failed_checks(right, unknown)


def test_orders_of_convergence_are_measured_over_all_values():
    first, second = ({h: 1 - 0.3 * h**power for h in (0.04, 0.02, 0.01)} for power in (1, 2))
    assert law_table(make_rows(first, order=1.0)).slope[0] == pytest.approx(1)
    assert law_table(make_rows(second, order=1.0)).slope[0] == pytest.approx(2)
    failed = [c.label for c in check(make_rows(second, order=1.0)) if not c.holds]
    assert "largest error of an order of convergence" in failed


def test_a_wrong_coefficient_is_not_recovered():
    """With twice the coefficient in theory, the ratio is a half."""
    law = next(law for law in ALL if law.name == "gradient_descent")

    def with_wrong_theory(step, seed):
        right = law.estimate(step, seed)
        return replace(right, theory={"gradient_norm": 2 * right.theory["gradient_norm"]})

    wrong = replace(law, estimate=with_wrong_theory)
    rows = pd.DataFrame(law_rows(wrong, "steps", seeds=range(3, 4)))
    assert rows.ratio.to_numpy() == pytest.approx(0.5, abs=0.01)
    assert not law_table(rows).recovered.any()


def test_rows_depend_only_on_their_seed():
    tiny = replace(laws.QUICK, first=7, seeds=2)
    others = [law.name for law in ALL if law.name not in ("sam", "mixup")]
    rows = pd.DataFrame(run(laws, tiny, finished=others))
    assert set(rows.seed) == {7, 8}
    again = pd.DataFrame(run(laws, replace(tiny, first=8, seeds=1), finished=others))
    columns = ["law", "term", "value", "estimate", "low", "high"]
    first = rows[rows.seed == 8][columns].reset_index(drop=True)
    pd.testing.assert_frame_equal(first, again[columns])


def test_the_stored_rows_hold_and_are_drawn(stored, tmp_path):
    assert stored.seed.nunique() == laws.PAPER.seeds
    assert set(stored.law) == {law.name for law in ALL}
    assert [c.label for c in check(stored) if not c.holds] == []
    for path in plots.save(laws.plot(stored), tmp_path):
        assert path.stat().st_size > 10_000


def test_the_tables_in_the_docs_are_those_of_the_stored_rows(stored):
    page = (ROOT / "docs" / "laws.md").read_text()
    for section in SECTIONS:
        assert markdown_table(stored, section) in page
