"""A figure of matplotlib as SVG inside an HTML page, with its text alternative."""

import io
import re
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENLARGED = 1.4
"""How much larger than on paper a figure is at most."""
PIXELS = 96
"""Of an inch, in CSS."""


def write_figure(figure: "Figure", name: str, caption: str, alternative: str) -> str:
    """A <figure>. Names inside the SVG are made unique by `name`, because a page has several.

    Args:
        figure: what to draw.
        name: of this figure on the page.
        caption: the text below it.
        alternative: what it shows, for readers who do not see it.
    """
    return (
        f'<figure id="figure-{name}">\n{_inline(figure, name, alternative)}\n'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _inline(figure: "Figure", name: str, alternative: str) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    text = file.getvalue().decode()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # its rules are for all SVG
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    width = ENLARGED * PIXELS * figure.get_figwidth()
    root = re.compile(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', re.DOTALL)
    start = (
        f'<svg \\1 xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'style="width: 100%; max-width: {width:.0f}px; height: auto; stroke-linejoin: round; '
        f'stroke-linecap: butt">'
    )
    text = root.sub(start, text, count=1)
    return text.replace("<defs/>", "").replace('">', f'" aria-label="{escape(alternative)}">', 1)
