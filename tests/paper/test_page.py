"""The page shows what is stored, and nothing of it is taken for HTML."""

import json
import os
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from tacit_paper import Check, page, plots, store

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
def hostile(tmp_path, monkeypatch):
    """A folder of results in which every text is hostile."""

    def draw(result):
        (result.folder / "figure.svg").write_text(f'<svg width="{HOSTILE}"></svg>')

    experiment = SimpleNamespace(
        QUICK=None, plot=None, __doc__=f"{HOSTILE}\n\n{HOSTILE}",
        check=lambda rows: [Check(HOSTILE, 1.0, HOSTILE, True)],
    )  # fmt: skip
    for module in (page, plots):
        monkeypatch.setattr(module, "find_experiment", lambda name: experiment)
    monkeypatch.setattr(plots, "draw", draw)
    monkeypatch.setattr(page, "EXPERIMENTS", (HOSTILE,))
    settings = {"experiment": HOSTILE, "preset": HOSTILE, "config": {HOSTILE: HOSTILE}}
    metadata = {**settings, "device": HOSTILE, "made_with": {}}
    metadata["config_hash"] = store._config_hash(metadata)
    folder = tmp_path / "results" / "quick"
    tables = [store._write_part(folder, 0, [{"unit": HOSTILE, "value": 1.0}], "0")]
    monkeypatch.setattr(store.platform, "platform", lambda terse: HOSTILE)
    store._join_parts(folder, tables, metadata)
    return tmp_path / "results"


def test_hostile_texts_are_shown_as_they_are(hostile):
    parsed = Tags(page.write_page(hostile).read_text())
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert not any("onerror" in attributes for _, attributes in parsed.tags)
    assert [tag for tag, _ in parsed.tags].count("img") == 1
    (section,) = (attributes for tag, attributes in parsed.tags if tag == "section")
    assert section == {"id": f"{HOSTILE}-{HOSTILE}"}
    (link,) = (attributes for tag, attributes in parsed.tags if tag == "a")
    assert link == {"href": f"#{HOSTILE}-{HOSTILE}"}
    assert parsed.text.count("<script>alert(1)</script>") >= 8
    assert "$links" in parsed.text


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
    ("svg", "width"),
    [
        (b'<svg height="3pt" width="900.5pt">', 810), (b'<svg width="600pt">', 0), (b"<svg>", 0),
        (b'<svg width="1.2.3pt"><svg width="2pt">', 0), (b'<svg width="99999999999pt">', 0),
    ],
)  # fmt: skip
def test_the_width_of_any_figure_can_be_read(svg, width):
    assert page._minimum_width(svg) == width
