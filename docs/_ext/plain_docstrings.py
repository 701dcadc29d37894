"""Docstrings are plain text with formulas: what reStructuredText would misread is made literal."""

import re

SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Note|Example|Examples):$")
CODE = re.compile(r"(``.+?``|`[^`]+`)")
SPECIAL = re.compile(r"([*|_\\])")
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


def shorten_defaults(app, what, name, obj, options, signature, annotation):
    """Defaults that are functions as ..., so that the signature can be read."""
    if signature and LAMBDA.search(signature):
        return LAMBDA.sub("...", signature).replace("~", ""), annotation
    return None


def setup(app):
    """Connect to autodoc, ahead of napoleon."""
    app.connect("autodoc-process-docstring", rewrite, priority=400)
    app.connect("autodoc-process-signature", shorten_defaults)
    return {"parallel_read_safe": True}
