"""A summary in one of the formats."""

from typing import Literal, get_args

from tacit.display.contents import Summary
from tacit.display.html import write_html
from tacit.display.latex import write_latex
from tacit.display.markdown import write_markdown
from tacit.display.text import write_text
from tacit.errors import check_choice

Format = Literal["text", "markdown", "latex", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
WRITERS = {
    "text": write_text,
    "markdown": write_markdown,
    "latex": write_latex,
    "html": write_html,
}


def render(summary: Summary, format: Format = "text") -> str:
    """The summary as text of 88 columns, Markdown (GitHub's tables), LaTeX, or a part of a page.

    LaTeX needs the package booktabs. HTML is one <section> without a style.

    >>> content = Summary("a title", lead=("It holds.",), no_problems="No problems.")
    >>> print(render(content, "markdown"))
    **It holds.**
    <BLANKLINE>
    a title
    <BLANKLINE>
    No problems.
    """
    check_choice("format", format, FORMATS)
    return WRITERS[format](summary)
