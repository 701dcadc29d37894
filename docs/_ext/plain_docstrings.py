"""Docstrings are plain text with formulas: what reStructuredText would misread is made literal."""

import re

SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Note|Example|Examples):$")
CODE = re.compile(r"(``.+?``|`[^`]+`)")
SPECIAL = re.compile(r"([*|_\\])")


def escape(line: str) -> str:
    """The line with the marks of reStructuredText escaped, but for code in backticks.

    >>> escape("Σ|θ|^p of `l2`")
    'Σ\\\\|θ\\\\|^p of `l2`'
    """
    parts = CODE.split(line)
    return "".join(
        part if index % 2 else SPECIAL.sub(r"\\\1", part) for index, part in enumerate(parts)
    )


def make_literal(lines: list[str]) -> list[str]:
    """The lines of a docstring, with indented formulas and code as literal blocks."""
    result: list[str] = []
    literal = section = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if line and not indented:
            literal, section = False, bool(SECTION.match(line))
        begins = indented and number > 0 and not lines[number - 1].strip()
        if begins and not section and not literal:
            literal = True
            result += ["::", ""]
        if literal or line.lstrip().startswith((">>>", "...")):
            result.append(line)
        elif number and lines[number - 1].lstrip().startswith((">>>", "...")) and line.strip():
            result.append(line)  # what an example prints
        else:
            result.append(escape(line))
    return result


def process(app, what, name, obj, options, lines) -> None:
    """Rewrite a docstring before its sections are read."""
    lines[:] = make_literal(lines)


def setup(app):
    """Connect to autodoc, ahead of napoleon."""
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True}
