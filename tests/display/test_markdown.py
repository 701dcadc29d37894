"""A summary in Markdown reads as it was written, by a parser of Markdown."""

from dataclasses import replace

from markdown_it import MarkdownIt
from support.summaries import AWKWARD, CONTENT, LETTERS

from tacit.display import render


def parse(text):
    return MarkdownIt("commonmark").enable("table").enable("strikethrough").parse(text)


def texts(token):
    """The text of a paragraph or cell, without what is only its style."""
    return "".join(t.content for t in token.children if t.type in ("text", "text_special"))


def cells(tokens, kind):
    return [texts(tokens[i + 1]) for i, token in enumerate(tokens) if token.type == f"{kind}_open"]


def read(text):
    """Characters as they are read: runs of space are one."""
    return " ".join(text.split())


def test_every_character_of_a_cell_is_read_as_it_was_written():
    tokens = parse(render(CONTENT, "markdown"))
    assert cells(tokens, "th") == ["name", "value", "±kind"]
    expected = [AWKWARD, "-0.5", "1", "1. two", "(3e-05)", "–", "… and 2 more", "", ""]
    assert cells(tokens, "td") == [read(text) for text in expected]


def test_paragraphs_and_lists_have_the_parts_of_the_summary_in_order():
    tokens = parse(render(CONTENT, "markdown"))
    paragraphs = [texts(t) for i, t in enumerate(tokens) if tokens[i - 1].type == "paragraph_open"]
    assert paragraphs == [
        read(text)
        for text in (
            f"First {AWKWARD}.", "Second.", "tacit: a title & more", f"target: {LETTERS}",
            f"loss: {AWKWARD}", "± a note", "95 % intervals: l2 [-1, 2]",
            "explained 0.5, cosine 0.7, rank 1 of 2", f"weak: message {AWKWARD} remedy {{",
            "noisy: b c", f"Finding: finding {AWKWARD}",
        )
    ]  # fmt: skip
    assert sum(t.type == "ordered_list_open" for t in tokens) == 1
    assert sum(t.type == "table_open" for t in tokens) == 1
    assert not any(t.type in ("heading_open", "code_block", "html_block", "hr") for t in tokens)


def test_text_that_looks_like_a_list_or_a_heading_is_a_paragraph():
    for text in ("1. one", "- a", "+ b", "= c", "# d", "> e", "2) f"):
        tokens = parse(render(replace(CONTENT, title=text, lead=(), facts=()), "markdown"))
        assert tokens[0].type == "paragraph_open", text
        assert texts(tokens[1]) == text


def test_without_problems_it_says_so():
    assert "No problems found\\." not in render(replace(CONTENT, problems=()), "markdown")
    assert "No problems found." in render(replace(CONTENT, problems=()), "markdown")
