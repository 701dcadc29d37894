"""The pages of the documentation, their code blocks and their commands."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name_of(page):
    """A page's path in the repository."""
    return str(page.relative_to(ROOT))


def code_blocks(page):
    """Language and content of every code block, in order."""
    return BLOCK.findall(page.read_text())


def commands(page):
    """The commands of a page's console blocks, in order, as lists of words."""
    for language, content in code_blocks(page):
        if language in ("console", "bash", "sh"):
            for line in content.replace("\\\n", " ").splitlines():
                if command := shlex.split(line, comments=True):
                    yield command
