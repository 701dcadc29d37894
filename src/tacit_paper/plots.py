"""Style and files of figures. matplotlib is imported only inside functions."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit_paper.store import write_atomically

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
    "svg.hashsalt": "tacit",  # the same figure gives the same bytes
    "svg.fonttype": "path",
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in this style, independent of the user's matplotlib settings."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure without a window; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", folder: Path, name: str = "figure") -> list[Path]:
    """Write a figure as SVG, PDF and PNG, without the date, so that its bytes are reproducible."""
    paths = []
    for kind in FORMATS:
        path = folder / f"{name}.{kind}"
        no_date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        with style():
            write_atomically(path, partial(figure.savefig, format=kind, dpi=150, metadata=no_date))
        paths.append(path)
    return paths


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's t interval for the mean of independent values; of width 0 for a single value."""
    from scipy import stats

    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, mean
    standard_error = math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1) / count)
    half_width = float(stats.t.ppf((1 + level) / 2, count - 1)) * standard_error
    return mean - half_width, mean + half_width
