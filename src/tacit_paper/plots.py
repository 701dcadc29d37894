"""How figures look, and how they are written: matplotlib is imported only here and in `plot`."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#1b6ca8", "#d9731a", "#2e8b57", "#b03a48", "#7f7f7f"
FORMATS = ("svg", "pdf", "png")

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "figure.dpi": 110,
    "svg.hashsalt": "tacit",  # the same figure, the same bytes
    "svg.fonttype": "path",
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the house style, whatever the user's settings, and without a screen."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure that belongs to no window; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", folder: Path, name: str = "figure") -> list[Path]:
    """Write a figure as SVG, PDF and PNG, each whole or not at all."""
    paths = []
    for kind in FORMATS:
        path = folder / f"{name}.{kind}"
        partial = path.with_name(f".{path.name}.partial")
        dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        with style():
            figure.savefig(partial, format=kind, dpi=150, metadata=dates)
        partial.replace(path)
        paths.append(path)
    return paths


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """A t interval for the mean of a few independent values; one value has none."""
    from scipy import stats

    count = len(values)
    middle = sum(values) / count
    if count < 2:
        return middle, middle
    spread = math.sqrt(sum((v - middle) ** 2 for v in values) / (count - 1) / count)
    width = float(stats.t.ppf((1 + level) / 2, count - 1)) * spread
    return middle - width, middle + width
