"""The page shows what is stored, and nothing of it is taken for HTML."""

import base64
import json
import os
import shutil
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.browser import Browser, needs_browser
from support.page_checks import check_keyboard, check_page
from support.results import store_result

import tacit
from tacit_paper import (
    EXPERIMENTS,
    Check,
    Claim,
    Evidence,
    find_experiment,
    page,
    plots,
    read_text,
    store,
    verdicts,
)
from tacit_paper.slips import SLIPS

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'$links"


class Tags(HTMLParser):
    """All tags of a page with their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def experiment(monkeypatch):
    """A made-up experiment, alone in the paper; its figures are empty and named."""

    def draw(result):
        for name in ("figure", "details"):
            (result.folder / f"{name}.svg").write_text(f'<svg width="{HOSTILE}">{name}</svg>')

    def measure(rows):
        return Evidence(f"value {rows.value[0]}", bool(rows.value[0] == 1))

    made_up = SimpleNamespace(
        QUICK=None, plot=None, __doc__="Title\n\nCaption\n\nDetail", FIGURE="Figure 1",
        CLAIMS=[Claim("Value is 1.", "App. A", "holds", measure, "Caveat.")],
        check=lambda rows: [Check("label", 1.0, "≤ 2", True)],
    )  # fmt: skip
    for module in (page, plots, verdicts):
        monkeypatch.setattr(module, "find_experiment", lambda name: made_up)
    monkeypatch.setattr(plots, "draw", draw)
    monkeypatch.setattr(verdicts, "EXPERIMENTS", ("toy",))
    return made_up


@pytest.fixture
def hostile(tmp_path, monkeypatch, experiment):
    """A folder of results in which every text is hostile."""

    def measure(rows):
        return Evidence(HOSTILE, agrees=True)

    experiment.__doc__ = f"{HOSTILE}\n\n{HOSTILE}\n\n{HOSTILE}"
    experiment.FIGURE = HOSTILE
    experiment.CLAIMS = [Claim(HOSTILE, f"place {HOSTILE}", HOSTILE, measure, HOSTILE)]
    experiment.check = lambda rows: [Check(HOSTILE, 1.0, HOSTILE, True)]
    monkeypatch.setattr(verdicts, "EXPERIMENTS", (HOSTILE,))
    monkeypatch.setattr(store.platform, "platform", lambda terse: HOSTILE)
    store_result(tmp_path / "results" / "quick", HOSTILE, HOSTILE, [{"value": 1.0}])
    return tmp_path / "results"


def write(tmp_path):
    """The text of the page, and its tags."""
    text = page.write_page(tmp_path).read_text()
    return text, Tags(text)


def test_hostile_texts_are_shown_as_they_are(hostile):
    _, parsed = write(hostile)
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert not any("onerror" in attributes for _, attributes in parsed.tags)
    assert [tag for tag, _ in parsed.tags].count("img") == 1
    (section, slips) = (attributes for tag, attributes in parsed.tags if tag == "section")
    assert (section, slips) == ({"id": HOSTILE}, {"id": "slips"})
    links = [attributes for tag, attributes in parsed.tags if tag == "a"]
    skip = {"class": "skip", "href": "#content"}
    assert links == [skip, *[{"href": f"#{HOSTILE}"}] * 2, {"href": "#slips"}]
    assert parsed.text.count("<script>alert(1)</script>") >= 18
    assert "$links" in parsed.text


def test_the_claims_come_before_the_figures(tmp_path, experiment):
    store_result(tmp_path / "paper" / "toy", "toy", "paper", [{"value": 1.0}])
    text, parsed = write(tmp_path)
    assert text.index("1 claim: 1 holds.") < text.index("Value is 1.") < text.index("<img")
    assert ("span", {"class": "verdict holds"}) in parsed.tags
    assert ("a", {"href": "#toy"}) in parsed.tags
    assert "Figure 1 · Title paper size" in parsed.text
    assert "value 1.0" in parsed.text


@pytest.mark.parametrize(
    ("preset", "value", "state"),
    [("paper", 2.0, "rows-disagree"), ("quick", 2.0, "not-at-this-size"), ("quick", 1.0, "holds")],
)
def test_a_verdict_that_the_rows_contradict_is_not_shown(
    tmp_path, experiment, preset, value, state
):
    store_result(tmp_path / "toy", "toy", preset, [{"value": value}])
    _, parsed = write(tmp_path)
    assert ("span", {"class": f"verdict {state}"}) in parsed.tags
    assert f"value {value}" in parsed.text
    assert (preset == "quick") == ("quick\N{NO-BREAK SPACE}size" in parsed.text)
    assert (state == "holds") == ("Caveat." in parsed.text)


def test_one_size_is_shown_and_the_other_is_a_click_away(tmp_path, experiment):
    for preset in ("quick", "paper"):
        store_result(tmp_path / preset / "toy", "toy", preset, [{"value": 1.0}])
    text, parsed = write(tmp_path)
    shown, folded = text.split("<details class='other'>")
    assert "Figure 1 · Title <small>paper size" in shown
    assert (shown.count("<img"), folded.count("<img")) == (1, 1)
    assert "The same at quick size" in folded
    assert parsed.text.count("Caption") == 1
    assert [tag for tag, _ in parsed.tags].count("section") == 2  # the figure's and the slips


def test_a_second_figure_is_shown_below_the_caption(tmp_path, experiment):
    experiment.plot_details = None
    store_result(tmp_path / "toy", "toy", "paper", [{"value": 1.0}])
    text, _ = write(tmp_path)
    assert text.count("<img") == 1
    experiment.plot_details = plots.draw
    text, parsed = write(tmp_path)
    encoded = [a["src"].split(",")[1] for tag, a in parsed.tags if tag == "img"]
    assert [b"details" in base64.b64decode(image) for image in encoded] == [False, True]
    assert text.index("Caption") < text.index(encoded[1]) < text.index("Detail</p>")


def test_what_failed_stands_beside_a_number_that_is_not_met(tmp_path, experiment):
    experiment.check = lambda rows: [
        Check("a", 1.0, "≤ 2", True), Check("b", 3.0, "≤ 2", False, "protocol"),
        Check("c", 3.0, "≤ 2", False),
    ]  # fmt: skip
    store_result(tmp_path / "toy", "toy", "paper", [{"value": 1.0}])
    _, parsed = write(tmp_path)
    assert "Key numbers: 1 of 3 hold, 2 do not" in parsed.text
    for words in ("no: the paper's protocol", "no: our expectation"):
        assert parsed.text.count(words) == 1


def test_names_between_backticks_are_code(tmp_path, experiment):
    experiment.__doc__ = "Title\n\nWith `<b>tacit.l2</b>` and one ` alone."
    store_result(tmp_path / "toy", "toy", "paper", [{"value": 1.0}])
    text, parsed = write(tmp_path)
    assert "With <code>&lt;b&gt;tacit.l2&lt;/b&gt;</code> and one ` alone." in text
    assert [tag for tag, _ in parsed.tags].count("b") == len(SLIPS)  # no other


def test_versions_and_slips_are_on_the_page(tmp_path, experiment, monkeypatch):
    store_result(tmp_path / "toy", "toy", "paper", [{"value": 1.0}])
    _, parsed = write(tmp_path)
    assert f"tacit {tacit.__version__}, torch {torch.__version__}" in parsed.text
    assert all(slip.text in parsed.text for slip in SLIPS)
    monkeypatch.setattr(store, "_version", lambda name: "not installed")  # as of earlier times
    store_result(tmp_path / "toy", "toy", "paper", [{"value": 1.0}])
    assert "tacit without a version" in write(tmp_path)[1].text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_captions_are_short(name):
    text = read_text(find_experiment(name))
    assert text.title
    words = len(text.caption.split())
    assert 0 < words <= 80, f"the caption has {words} words: move some to the details"


def test_figures_are_in_the_order_of_the_paper():
    labels = [find_experiment(name).FIGURE for name in EXPERIMENTS]
    numbered = [f"Figure {number}" for number in range(1, 8)]
    numbered.insert(5, "Figure 5, continued")
    assert labels == numbered + ["New"] * (len(labels) - len(numbered))


def test_errors_are_shown_as_they_are(hostile, tmp_path):
    folder = hostile / "<script>alert(1)<"
    folder.mkdir()
    metadata = json.loads((hostile / "quick" / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(metadata))
    parsed = Tags(page.write_page(hostile).read_text())
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert "<script>alert(1)</rows.parquet is damaged" in parsed.text


def test_rows_that_a_figure_does_not_know_are_named_on_the_page(hostile, monkeypatch):
    monkeypatch.setattr(page.find_experiment(""), "check", lambda rows: rows.no_such_column)
    folder = Path(os.fsdecode(os.fsencode(hostile) + b"\xff"))
    hostile.rename(folder)
    text = Tags(page.write_page(folder).read_text()).text
    assert "are not those of the figure ('DataFrame' object has no attribute" in text
    assert r"results\udcff" in text


@pytest.mark.parametrize(
    ("svg", "widths"),
    [
        (b'<svg height="3pt" width="900.6pt">', (810, 1501)), (b'<svg width="600pt">', (0, 1000)),
        (b"<svg>", (0, 1000)), (b'<svg width="1.2.3pt"><svg width="2pt">', (0, 3)),
        (b'<svg width="99999999999pt">', (0, 1000)),
    ],
)  # fmt: skip
def test_the_width_of_any_figure_can_be_read(svg, widths):
    assert page._widths(svg) == widths


@pytest.mark.slow
@needs_browser
def test_the_stored_results_can_be_read_in_any_window(tmp_path):
    shutil.copytree(Path(__file__).parents[2] / "results" / "paper", tmp_path / "results")
    path = page.write_page(tmp_path / "results")
    with Browser(tmp_path) as browser:
        for width, dark in ((1280, False), (1280, True), (360, False), (360, True)):
            check_page(browser, path, width=width, dark=dark)
        check_keyboard(browser, path)
