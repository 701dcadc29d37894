"""A summary in HTML reads as it was written, by a parser of HTML."""

import xml.etree.ElementTree as ET

from support.summaries import AWKWARD, CONTENT, LETTERS

from tacit.display import Summary, render


def parse(summary):
    return ET.fromstring(render(summary, "html").replace("<br>", "<br/>"))


def words(element):
    return "".join(element.itertext())


def test_cells_and_remarks_are_those_of_the_table():
    (table,) = [t for t in parse(CONTENT).iter("table") if t.get("class") == "tacit-table"]
    assert [words(cell) for cell in table.iter("th") if cell.get("scope") == "col"] == [
        "name", "value", "±kind",
    ]  # fmt: skip
    rows = [[words(cell) for cell in row] for row in table.iter("tr")][1:]
    assert rows == [[AWKWARD, "-0.5", "1"], ["1. two", "(3e-05)", "–"], ["… and 2 more"]]
    assert [len(body) for body in table.iter("tbody")] == [2, 1]  # a gap begins a new body
    (remark,) = [row[0] for row in table.iter("tr") if row.get("class") == "tacit-remark"]
    assert remark.get("colspan") == "3"


def test_everything_else_is_there_once_and_in_order():
    section = parse(CONTENT)
    assert section.tag == "section"
    assert [words(p) for p in section.findall("p")] == [
        f"First {AWKWARD}.", "Second.", "± a note", "95 % intervals: l2 [-1, 2]",
        f"Finding: finding {AWKWARD}",
    ]  # fmt: skip
    facts, numbers = [t for t in section.iter("table") if "tacit-pairs" in t.get("class")]
    pairs = [[words(cell) for cell in row] for row in facts.iter("tr")]
    assert pairs == [["target", LETTERS], ["loss", AWKWARD]]
    pairs = [[words(cell) for cell in row] for row in numbers.iter("tr")]
    assert pairs == [["explained", "0.5"], ["cosine", "0.7"], ["rank", "1 of 2"]]
    assert [words(item) for item in section.iter("li")] == [
        f"weak: message {AWKWARD} remedy {{", "noisy: b c",
    ]  # fmt: skip


def test_an_empty_summary_is_its_title():
    assert words(parse(Summary("no row yet"))).strip() == "no row yet"
