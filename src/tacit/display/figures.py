"""The style of all figures: sizes for papers, and colours that differ in grey too."""

import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.3, 6.8
"""Widths in inches: of a column, and of a page of two columns."""
BLUE, ORANGE, GREEN, RED, GREY = "#1b6ca8", "#d9731a", "#2e8b57", "#b03a48", "#7f7f7f"
DARK, PALE = "#0b2f4a", "#b8c4cf"
SERIES = ((BLUE, "-"), (ORANGE, "--"), (DARK, ":"), (GREEN, "-."), (RED, (0, (1, 1, 4, 1))))
"""Colours and strokes of lines in one panel, which differ without colour."""
SMALL = 7
"""Points of the smallest letters."""
LETTERS = 17.5
"""Letters of 8 points in an inch, on average."""


def style() -> AbstractContextManager[None]:
    """Draw in this style, independent of the user's matplotlib settings."""
    _check_matplotlib()
    import matplotlib as mpl

    return mpl.rc_context(fname=Path(__file__).with_name("figures.mplstyle"))


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure without a window, which is saved in the library's style; sizes in inches."""
    _check_matplotlib()
    return _figure_class()(figsize=(width, height), layout="constrained")


@cache
def _figure_class() -> Any:
    """A Figure that is saved in the style, in which fonts are embedded as whole letters."""
    from matplotlib.figure import Figure

    class PaperFigure(Figure):
        """A figure that ignores the user's settings of matplotlib when it is saved."""

        def savefig(self, fname: Any, **options: Any) -> None:
            with style():
                super().savefig(fname, **options)

    return PaperFigure


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(
            "figures are drawn with matplotlib, which is not installed: pip install 'tacit[plots]'."
        ) from error


def set_title(figure: "Figure", lines: Sequence[str]) -> None:
    """Lines above all panels at the left, wrapped to the width of the figure."""
    width = int(LETTERS * figure.get_figwidth())
    lines = [line.replace(" %", "\u00a0%") for line in lines]
    text = "\n".join(part for line in lines for part in textwrap.wrap(line, width))
    figure.suptitle(text, x=0.01, ha="left", linespacing=1.25)


def write_number(value: float) -> str:
    """Three digits, with a minus sign instead of a hyphen."""
    return f"{value:.3g}".replace("-", "−")


def write_ticks(axis: Any, most: int = 4) -> None:
    """Few ticks with short numbers, without a factor at the end of the axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(most, min_n_ticks=2))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}".replace("-", "−")))
