"""The skeleton of a self-contained HTML page, with the one style that all pages share."""

from html import escape
from pathlib import Path

ICON = "data:,"  # an empty one, so that browsers ask no server for it


def write_page(title: str, body: str, *, style: str = "") -> str:
    """A whole page that needs no other file and no network.

    Args:
        title: the title of the window, as text.
        body: HTML, which begins with an h1.
        style: rules of CSS for this page, after those of all pages.
    """
    shared = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="{ICON}">
<title>{escape(title)}</title><style>
{shared}{style}</style></head><body>
<a class="skip" href="#content">Skip to the content</a>
<main id="content" tabindex="-1">
{body}
</main>
</body></html>
"""


def scroll_box(content: str, label: str, *, tall: bool = False) -> str:
    """HTML in a box that is scrolled where it is too wide, also by keyboard, and has a label.

    What is tall is scrolled up and down too, except on paper.
    """
    attributes = f'role="region" tabindex="0" aria-label="{escape(label)}"'
    return f'<div class="scroll{" tall" * tall}" {attributes}>\n{content}\n</div>'
