"""Verdicts are said only where rows support them, and the documents show what stored rows give."""

from types import SimpleNamespace

import pytest
from support.pages import ROOT
from support.results import store_result

import tacit
from tacit_paper import Claim, Evidence, verdicts
from tacit_paper.slips import SLIPS
from tacit_paper.verdicts import Verdict

REWRITE = "run `python -m tacit_paper.verdicts` in the root of the clone, and read what changed"


def claim(verdict="holds", **options):
    """A claim about the mean of a column, which may be missing."""

    def measure(rows):
        if "value" not in rows:
            return None
        return Evidence(f"mean {rows.value.mean():.1f}", bool(rows.value.mean() > 1))

    return Claim("The mean | exceeds 1.", "App. A", verdict, measure, **options)


@pytest.fixture
def experiments(monkeypatch):
    """Two made-up experiments with a claim each, in this order."""
    made_up = {
        name: SimpleNamespace(__doc__=f"Title of {name}", FIGURE=figure, CLAIMS=[one])
        for name, figure, one in [
            ("first", "Figure 1", claim(caveat="Here.", headline=True)),
            ("second", "New", claim("artefact")),
        ]
    }
    monkeypatch.setattr(verdicts, "EXPERIMENTS", tuple(made_up))
    monkeypatch.setattr(verdicts, "find_experiment", made_up.__getitem__)
    return made_up


TWO, ZERO, NONE = [{"value": 2.0}], [{"value": 0.0}], [{"other": 0.0}]


@pytest.mark.parametrize(
    ("verdict", "preset", "rows", "state", "number"),
    [
        ("holds", "paper", TWO, "holds", "mean 2.0"),
        ("artefact", "quick", TWO, "artefact", "mean 2.0"),
        ("holds", "paper", ZERO, "rows disagree", "mean 0.0"),
        ("artefact", "paper", ZERO, "rows disagree", "mean 0.0"),
        ("holds", "quick", ZERO, "not at this size", "mean 0.0"),
        ("holds", "quick", NONE, "not at this size", ""),
        ("holds", "paper", NONE, "no rows", ""),
        ("not tested", "paper", NONE, "not tested", ""),
    ],
)
def test_a_verdict_is_said_where_rows_support_it(
    tmp_path, experiments, verdict, preset, rows, state, number
):
    experiments["first"].CLAIMS = [claim(verdict, caveat="Here.")]
    store_result(tmp_path / preset / "first", "first", preset, rows)
    found = verdicts.gather(tmp_path)[0]
    assert (found.state, found.number) == (state, number)
    assert found.caveat == ("Here." if state == verdict else "")


def test_the_paper_size_decides_and_the_order_is_that_of_the_paper(tmp_path, experiments):
    store_result(tmp_path / "a", "second", "paper", TWO)
    store_result(tmp_path / "b", "first", "quick", ZERO)
    assert [v.state for v in verdicts.gather(tmp_path)] == ["not at this size", "artefact"]
    for folder in ("0", "z"):  # whichever is found first
        store_result(tmp_path / folder, "first", "paper", TWO)
        found = verdicts.gather(tmp_path)
        assert [(v.experiment, v.preset, v.state) for v in found] == [
            ("first", "paper", "holds"), ("second", "paper", "artefact"),
        ]  # fmt: skip


def test_claims_without_rows_are_listed(tmp_path, experiments):
    found = verdicts.gather(tmp_path / "missing")
    assert [v.state for v in found] == ["no rows", "no rows"]
    assert verdicts.summarise(found) == "2 claims: 2 have no rows here."


def test_rows_that_a_claim_does_not_know_are_named(tmp_path, experiments):
    experiments["first"].CLAIMS = [Claim("", "", "holds", lambda rows: rows.no_such_column)]
    store_result(tmp_path / "odd", "first", "paper", TWO)
    with pytest.raises(tacit.InputError, match=r"rows in .*odd are not those of the figure"):
        verdicts.gather(tmp_path)


def test_the_summary_counts_every_state_once():
    good, bad = Evidence("", agrees=True), Evidence("", agrees=False)
    kinds = ["holds", "holds", "holds with a caveat", "artefact", "not tested"]
    found = [Verdict("first", claim(kind), "paper", good) for kind in kinds]
    found += [Verdict("first", claim(), "paper", bad), Verdict("first", claim(), "quick", None)]
    assert verdicts.summarise(found) == (
        "7 claims: 2 hold, 1 holds with a caveat, 1 is an artefact, 1 is not tested, "
        "1 does not show at this size, 1 disagrees with the rows."
    )
    assert verdicts.summarise([]) == "No claims."


def test_documents_are_tables_of_claims(tmp_path, experiments):
    for name in experiments:
        store_result(tmp_path / name, name, "paper", TWO)
    found = verdicts.gather(tmp_path)
    page = verdicts.claims_page(found)
    assert "2 claims: 1 holds, 1 is an artefact." in page
    assert r"| The mean \| exceeds 1. | App. A | holds | mean 2.0 | Here. |" in page
    assert page.index("## Figure 1 · Title of first") < page.index("## New · Title of second")
    assert all(slip.text in page and slip.place in page for slip in SLIPS)
    assert page.index("## In short") < page.index("## Figure 1")
    assert page.count(r"| The mean \| exceeds 1. | holds | mean 2.0 |") == 1


@pytest.fixture(scope="module")
def stored():
    """The claims with the rows of the paper's size that are part of the repository."""
    return verdicts.gather(ROOT / "results" / "paper")


def test_stored_rows_support_every_verdict(stored):
    wrong = [
        f"{v.experiment}: {v.claim.statement} {v.claim.verdict}? {v.state}: {v.number}"
        for v in stored
        if v.state != v.claim.verdict
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_of_claims_shows_the_numbers_of_stored_rows(stored):
    assert (ROOT / "docs" / "claims.md").read_text() == verdicts.claims_page(stored), REWRITE


def test_few_claims_are_headlines(stored):
    assert len([v for v in stored if v.claim.headline]) <= 10
