"""A report says what its result says, whatever that contains, in one file."""

import html
import re
import sys
from itertools import pairwise

import matplotlib as mpl
import pytest
import torch
from support.page_checks import Tags
from support.reports import HOSTILE, RESULTS, deep_model, doubtful_fit, good_fit, ridge_model
from support.systems import draw, equations
from torch.nn import functional as F

import tacit
from tacit.display.numbers import round_with_ends
from tacit.display.page import scroll_box
from tacit.fitting.layer_table import summarize_layers
from tacit.fitting.summary import merge_similar, summarize
from tacit.reporting.inline_svg import write_figure


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The text of the page of every result."""
    folder = tmp_path_factory.mktemp("reports")
    return {
        name: tacit.report(make(), folder / f"{name}.html").read_text()
        for name, make in RESULTS.items()
    }


@pytest.mark.parametrize("name", RESULTS)
def test_a_page_is_whole_and_refers_to_no_other_file(pages, name):
    text = pages[name]
    parsed = Tags(text)
    tags = [tag for tag, _ in parsed.tags]
    assert text.startswith("<!doctype html>")
    assert ("html", {"lang": "en"}) in parsed.tags
    assert tags.count("title") == tags.count("main") == tags.count("h1") == 1
    assert "script" not in tags
    assert not any(key.startswith("on") for _, attributes in parsed.tags for key in attributes)
    links = [a for _, attributes in parsed.tags for k, a in attributes.items() if k[-4:] == "href"]
    links += [a for _, attributes in parsed.tags for k, a in attributes.items() if k == "src"]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.findall(r"@import|url\((?!#)", text)
    names = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(names) == len(set(names))
    assert {link[1:] for link in links if link.startswith("#")} <= set(names)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(names)


@pytest.mark.parametrize("name", RESULTS)
def test_headings_are_in_order_and_figures_have_a_text(pages, name):
    parsed = Tags(pages[name])
    levels = [level for level, _ in parsed.headings]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    figures = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert figures
    assert all(f["role"] == "img" and len(f["aria-label"]) > 30 for f in figures)
    tables = [tag for tag, _ in parsed.tags].count("table")
    boxes = [
        attributes
        for _, attributes in parsed.tags
        if attributes.get("class", "").startswith("scroll")
    ]
    assert len(boxes) == tables > 0  # every table is scrolled by itself
    assert all((b["role"], b["tabindex"]) == ("region", "0") and b["aria-label"] for b in boxes)


@pytest.mark.parametrize("name", ["good", "doubtful", "no signal"])
def test_a_fit_is_reported_with_all_that_its_summary_says(pages, name):
    fit, text = RESULTS[name](), Tags(pages[name]).text
    summary = summarize(fit)
    for sentence in (*summary.lead[:1], *summary.findings):
        assert sentence in text
    tables = [*summary.tables, *(summarize_layers(fit).tables if len(fit.layers) > 1 else [])]
    for table in tables:
        for cell in [cell for row in table.rows for cell in row]:
            assert cell.strip() in text
        assert all(note.text in text for note in table.notes)
    for problem in merge_similar(fit.problems):
        assert problem.kind in text
        assert problem.message in text
        assert problem.remedy in text
    assert ("No problems found" in text) == (not fit.problems)
    for label, fact in [*summary.facts, *(pair for line in summary.numbers for pair in line)]:
        assert label in text
        assert all(line in text for line in fact.split("\n"))
    for words in ("∇L(θ) + Σ λₖ ∇Rₖ(θ) = 0", tacit.__version__, "evaluation mode", "Σ θ_i²"):
        assert words in text


@pytest.mark.parametrize(
    ("name", "tone", "badge"),
    [
        ("good", "good", "No problems found"),
        ("doubtful", "doubt", "reasons for doubt: "),
        ("no signal", "bad", "reason for doubt: no signal"),
        ("screen", "plain", "Nothing confirmed"),
        ("answer", "good", "Confirmed, and the answer"),
        ("watch", "good", "No problems found"),
        ("validation", "good", "No problems found"),
    ],
)
def test_the_verdict_is_in_a_box_at_the_top(pages, name, tone, badge):
    start, end = (pages[name].index(words) for words in ('<div class="answer', '<nav class="cont'))
    box = pages[name][start:end]
    assert box.startswith(f'<div class="answer {tone}">')
    assert badge in html.unescape(box)
    assert ('href="#problems"' in box) == (tone in ("doubt", "bad"))


def test_the_verdict_has_strengths_with_their_widest_interval(pages):
    fit = good_fit()
    low, high = fit.intervals()["sampling"]["l2"]
    text = Tags(pages["good"]).text
    strength, low_end, high_end = round_with_ends(fit.strengths["l2"], low, high)
    numbers = f"95 % interval {low_end} to {high_end} for the choice of examples"
    assert f"l2 has strength {strength}, {numbers}" in text.replace("−", "-")
    assert f"[{low_end}, {high_end}]" in text  # the same numbers as in the table


def test_hostile_names_are_text(pages):
    parsed = Tags(pages["doubtful"])
    assert "img" not in [tag for tag, _ in parsed.tags]
    assert parsed.text.count(HOSTILE) >= 5
    labels = [attributes.get("aria-label", "") for tag, attributes in parsed.tags if tag == "svg"]
    assert any(HOSTILE in label for label in labels)


def test_a_long_table_is_scrolled_in_its_box(tmp_path):
    model, data = deep_model(layers=25)
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.l2(), tacit.l1()])
    text = tacit.report(fit, tmp_path / "report.html").read_text()
    parsed = Tags(text)
    tall = [a for _, a in parsed.tags if a.get("class") == "scroll tall"]
    assert [attributes["aria-label"] for attributes in tall] == ["layers"]
    assert all(f">{number}</th>" in text for number in range(25))


def test_a_title_is_shown_as_it_is(tmp_path):
    text = tacit.report(good_fit(), tmp_path / "r.html", title=HOSTILE).read_text()
    assert Tags(text).text.count(HOSTILE) == 2
    assert f"<h1>{html.escape(HOSTILE)}</h1>" in text


def test_the_same_result_gives_the_same_bytes(tmp_path):
    one, two = (tacit.report(doubtful_fit(), tmp_path / f"{n}.html") for n in (1, 2))
    assert one.read_bytes() == two.read_bytes()


def test_the_settings_of_matplotlib_do_not_change_a_report(tmp_path):
    one = tacit.report(good_fit(), tmp_path / "1.html")
    with mpl.rc_context({"font.size": 30, "svg.fonttype": "none", "savefig.dpi": 10}):
        two = tacit.report(good_fit(), tmp_path / "2.html")
    assert one.read_bytes() == two.read_bytes()


def test_equations_from_a_file_are_reported_without_what_they_do_not_have(tmp_path):
    good_fit().equations.save(tmp_path / "equations.safetensors")
    fit = tacit.fit(tacit.Equations.load(tmp_path / "equations.safetensors"))
    text = tacit.report(fit, tmp_path / "report.html").read_text()
    assert "l2 explains 100.0 % of the target." in text
    assert "figure-gradients" not in text


def test_a_model_that_moved_on_is_reported_without_its_gradients(tmp_path):
    model, data = ridge_model()
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.l2()])
    model.weight.data += 1
    text = Tags(tacit.report(fit, tmp_path / "report.html").read_text()).text
    assert "Not drawn: " in text


def test_without_matplotlib_the_report_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = tacit.report(good_fit(), tmp_path / "report.html").read_text()
    assert "Not drawn: figures are drawn with matplotlib" in text
    assert "l2 explains 100.0 % of the target." in text
    assert "<svg" not in text


def test_a_constrained_fit_says_why_it_has_no_layers(tmp_path):
    model, data = deep_model(layers=2)
    symmetric = tacit.regularizers.symmetric(scope="*.bias")
    fit = tacit.estimate(model, F.mse_loss, data, [symmetric], psd=True)
    text = Tags(tacit.report(fit, tmp_path / "report.html").read_text()).text
    assert "under Λ ⪰ 0" in text
    assert "a single layer has not all entries of Λ" in text


def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("before")
    with pytest.raises(tacit.InputError, match=r"report was given a int: pass what tacit\.estim"):
        tacit.report(3, path)
    with pytest.raises(tacit.InputError, match=r"path is 3: pass the path of an HTML file"):
        tacit.report(good_fit(), 3)
    with pytest.raises(tacit.InputError, match="cannot be written to"):
        tacit.report(good_fit(), tmp_path / "nowhere" / "report.html")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "before"


def test_a_watch_without_rows_is_refused(tmp_path):
    model = torch.nn.Linear(1, 1)
    objective = tacit.Objective(model, F.mse_loss, (torch.ones(4, 1), torch.ones(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = tacit.watch(model, optimizer, objective, [tacit.l2()], every=1)
    with pytest.raises(tacit.InputError, match="no row yet"):
        tacit.report(watch, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_labels_of_boxes_are_escaped():
    assert 'aria-label="&quot;&gt;&lt;b&gt;"' in scroll_box("", '"><b>')


def test_two_figures_on_a_page_share_no_names():
    figure = good_fit().plot()
    one, two = (write_figure(figure, name, "caption", "a text") for name in ("one", "two"))
    names = [set(re.findall(r'id="([^"]+)"', text)) for text in (one, two)]
    assert names[0]
    assert not names[0] & names[1]
    used = set(re.findall(r'href="#([^"]+)"', one)) | set(re.findall(r"url\(#([^)]+)\)", one))
    assert used <= names[0]


def test_a_page_has_the_strengths_of_a_hundred_layers(tmp_path):
    design = draw(1, 400, 100)
    fit = tacit.fit(equations(design, design.sum(1, keepdim=True)))
    assert "and 60 more" in fit.summary()
    text = tacit.report(fit, tmp_path / "report.html").read_text()
    assert "Fit.strengths has all" not in text
    assert all(f'">r{i}</th>' in text for i in range(100))
