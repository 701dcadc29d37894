r"""A summary in LaTeX: what it is made of, and that every symbol is one of TeX's mathematics."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.summaries import CONTENT

from tacit.display import render
from tacit.display.latex import escape

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"\\([A-Za-z]+|.)")
TEXT_COMMANDS = {
    *("begin", "end", "centering", "caption", "toprule", "midrule", "bottomrule", "addlinespace"),
    *("multicolumn", "emph", "textbf", "par", "medskip", "linewidth", "footnotesize"),
    *("raggedright", "ensuremath", "textbackslash", "textasciitilde", "textasciicircum"),
    *("textless", "textgreater", "textbar", "dots", "dag", "\\", ",", *"&%$#_{}"),
}
"""All of them are in LaTeX with booktabs, in any font encoding."""


def braces_of(text, start):
    """The contents of the braces that open at this place."""
    depth = 0
    for place in range(start, len(text)):
        if text[place - 1] != "\\" or text[place - 2 : place] == "\\\\":
            depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + 1 : place]
    raise AssertionError(f"unbalanced: {text[start : start + 60]}")


def mathematics(text):
    return [braces_of(text, m.end()) for m in re.finditer(r"\\ensuremath(?=\{)", text)]


def assert_compiles(text):
    """Braces and environments are balanced, and commands and mathematics are known ones."""
    from matplotlib.mathtext import MathTextParser

    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    plain = re.sub(r"\\[{}]", "", body)
    assert plain.count("{") == plain.count("}")
    open_environments = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", body):
        if kind == "begin":
            open_environments.append(name)
        else:
            assert open_environments.pop() == name
    assert not open_environments
    formulas = mathematics(body)
    for formula in formulas:  # \frac needs nothing more; \succeq and the others are TeX's
        MathTextParser("agg").parse(f"${formula}$")
    for formula in formulas:
        body = body.replace(f"\\ensuremath{{{formula}}}", "x")
    assert set(COMMAND.findall(body)) <= TEXT_COMMANDS
    assert not re.search(r"(?<!\\)[#^_$%]", body.replace("\\\\", ""))
    rest = {c for c in body if not c.isascii()}
    assert all(ord(c) < 0x180 and c.isalpha() for c in rest), rest


def test_a_summary_with_every_special_character_compiles():
    text = render(CONTENT, "latex")
    assert_compiles(text)
    assert_compiles(render(replace(CONTENT, tables=(), problems=(), lead=()), "latex"))


def test_the_table_has_its_rows_between_the_rules_of_booktabs():
    lines = render(CONTENT, "latex").splitlines()
    start, end = lines.index(r"\toprule"), lines.index(r"\bottomrule")
    assert lines[start - 1] == r"\begin{tabular}{lrr}"
    rows = lines[start + 1 : end]
    assert rows[0] == r"name & value & \ensuremath{\pm}kind \\"
    assert rows[1] == r"\midrule"
    assert rows[2].endswith(r" & \ensuremath{-}0.5 & 1 \\")
    assert rows[3] == r"1. two & (3e-05) & -- \\"
    assert rows[4] == r"\addlinespace"
    assert rows[5] == r"\multicolumn{3}{l}{\emph{\dots{} and 2 more}} \\"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a_b & 5 %", r"a\_b \& 5 \%"),
        ("l2[0.weight]", r"l2{[}0.weight{]}"),
        ("{\\", r"\{\textbackslash{}"),
        ("λ̂", r"\ensuremath{\hat{\lambda}}"),
        ("r̂", r"\ensuremath{\hat{r}}"),
        ("|̂½̂", r"\textbar{}\ensuremath{\frac{1}{2}}"),
        ("θᵀx₁²", r"\ensuremath{\theta}\ensuremath{^{T}}x\ensuremath{_{1}}\ensuremath{^{2}}"),
        ("10⁻³", r"10\ensuremath{^{-}}\ensuremath{^{3}}"),
        ("Σ Α ο", r"\ensuremath{\Sigma} \ensuremath{A} \ensuremath{o}"),
        ("x-ray -1 (-2) 3e-05", r"x-ray \ensuremath{-}1 (\ensuremath{-}2) 3e-05"),
        ("é 模", r"é {[}U+6A21{]}"),
    ],
)
def test_characters_become_commands(text, expected):
    assert escape(text) == expected


def test_every_character_of_the_library_has_a_command():
    characters = {c for path in ROOT.glob("src/tacit/**/*.py") for c in path.read_text()}
    shown = {c for c in characters if not c.isascii()} - {"─", "模"}
    assert len(shown) > 50
    unknown = {c for c in shown if "U+" in escape(f"x{c}")}
    assert unknown == set()
