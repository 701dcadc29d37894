"""Docstrings are plain text with formulas: what reStructuredText would misread is made literal."""

import re

SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Note|Example|Examples):$")
CODE = re.compile(r"(``.+?``|`[^`]+`)")
SPECIAL = re.compile(r"([*|_\\])")
SCOPE = re.compile(
    r"str \| [~\w.]*Collection\[str\] \| [~\w.]*Callable\[\[str\], bool\]"
    r" \| [~\w.]*Callable\[\[str, [~\w.]*Tensor\], bool\] \| None"
)
LAMBDA = re.compile(r"<function [^>]*<lambda>[^>]*>|<factory>")


def escape(line: str) -> str:
    """The line with the marks of reStructuredText escaped, but for code in backticks."""
    parts = CODE.split(line)
    return "".join(
        part if index % 2 else SPECIAL.sub(r"\\\1", part) for index, part in enumerate(parts)
    )


def is_example(line: str) -> bool:
    """Whether a line is of a doctest."""
    return line.lstrip().startswith((">>>", "..."))


def make_literal(lines: list[str]) -> list[str]:
    """The lines of a docstring, with indented formulas and code as literal blocks.

    What is indented after an empty line is a formula. What is indented below a line such as
    "Traps:" is text.
    """
    result: list[str] = []
    literal = text = example = False
    for number, line in enumerate(lines):
        before = lines[number - 1] if number else ""
        if line and not line.startswith("    "):
            literal = text = False
        elif line and before.strip() and not before.startswith("    "):
            text = True
        if line.startswith("    ") and not before.strip() and not (literal or text):
            literal = True
            result += ["::", ""]
        example = bool(line.strip()) and (is_example(line) or example)
        result.append(line if literal or example else escape(line))
    return result


def rewrite(app, what, name, obj, options, lines) -> None:
    """Rewrite a docstring before its sections are read."""
    lines[:] = make_literal(lines)
    if what in ("attribute", "data", "property"):
        lines.insert(0, "\\")  # an escaped line end; or napoleon takes "x: y" for a type


def shorten_signature(app, what, name, obj, options, signature, annotation):
    """Scopes by their name, and defaults that are functions as ..."""
    if signature is None:
        return None
    return LAMBDA.sub("...", SCOPE.sub("Scope", signature)), annotation


def setup(app):
    """Connect to autodoc, ahead of napoleon."""
    app.connect("autodoc-process-docstring", rewrite, priority=400)
    app.connect("autodoc-process-signature", shorten_signature)
    return {"parallel_read_safe": True}
