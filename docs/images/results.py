"""Draw the figures of docs/how-to/tables-and-figures.md, with the fit that the page makes."""

import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "how-to" / "tables-and-figures.md"


def main() -> None:
    """Run the page's first block, and draw its fit in every way."""
    block = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    names: dict[str, Any] = {}
    exec(compile(block[1], PAGE.name, "exec"), names)
    for kind in ("strengths", "gradients", "layers"):
        names["fit"].plot(kind).savefig(HERE / f"{kind}.png", dpi=160)


if __name__ == "__main__":
    main()
