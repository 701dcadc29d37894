"""The style of all figures: sizes for papers, and colours that differ in grey too."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.display.text import fit_names
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
POINTS = 72
"""Of an inch."""


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

        def _repr_png_(self) -> bytes:
            """The picture in a notebook, which shows figures only where pyplot was imported."""
            file = BytesIO()
            self.savefig(file, dpi=self.get_dpi())
            return file.getvalue()

    return PaperFigure


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401 # only to see whether it is there
    except ImportError as error:
        raise InputError(
            "figures are drawn with matplotlib, which is not installed: pip install 'tacit[plots]'."
        ) from error


def set_title(figure: "Figure", lines: Sequence[str]) -> None:
    """Lines above all panels at the left, wrapped to the width of the figure."""
    width = 0.96 * POINTS * figure.get_figwidth()  # letters are wider where pixels are few
    text = "\n".join(part for line in lines for part in wrap(line.replace(" %", "\u00a0%"), width))
    figure.suptitle(literal(text), x=0.01, ha="left", linespacing=1.25)


def wrap(text: str, width: float) -> list[str]:
    """The text in lines of at most `width` points, in letters of the style's titles.

    Lines end between words; a word that is wider than a line is cut.
    """
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if text_width(longer) <= width:
            lines[-1] = longer
            continue
        lines += [""] if lines[-1] else []
        for letter in word:
            lines += [""] if text_width(lines[-1] + letter) > width else []
            lines[-1] += letter
    return lines


def text_width(text: str, size: float | None = None) -> float:
    """Points that a text is wide in letters of this size, by default of the style's titles."""
    import matplotlib as mpl
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    if not text:
        return 0.0
    font = FontProperties(size=mpl.rcParams["figure.titlesize"] if size is None else size)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]


def literal(text: str) -> str:
    """The text as it is: matplotlib would read what is between two dollars as a formula."""
    return text.replace("$", r"\$")


def write_names(names: Iterable[str], width: int) -> list[str]:
    """Names on one line each in that many letters, for labels that are beside each other."""
    return [*map(literal, fit_names([" ".join(name.split()) for name in names], width))]


def write_number(value: float) -> str:
    """Three digits, with a minus sign instead of a hyphen."""
    return f"{value:.3g}".replace("-", "−")


def write_ticks(axis: Any, most: int = 4) -> None:
    """Few ticks with short numbers, without a factor at the end of the axis.

    Where labels beside each other would touch, there are fewer.
    """
    from matplotlib.ticker import FuncFormatter

    axis.set_major_locator(_locator_class()(most))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _write_tick(value)))


def _write_tick(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")


@cache
def _locator_class() -> Any:
    """A locator of ticks that takes as many as have room for their labels."""
    from matplotlib.ticker import MaxNLocator

    class RoomyLocator(MaxNLocator):
        """At most so many ticks, and at least two."""

        def __init__(self, most: int) -> None:
            super().__init__(most, min_n_ticks=2)
            self.most = most

        def tick_values(self, vmin: float, vmax: float) -> Any:
            ticks: Any = []
            for count in range(self.most, 0, -1):
                self.set_params(nbins=count)
                ticks = super().tick_values(vmin, vmax)
                if _has_room(self.axis, ticks, abs(vmax - vmin)):
                    break
            return ticks

    return RoomyLocator


def _has_room(axis: Any, ticks: Any, span: float) -> bool:
    """Whether labels of ticks beside each other do not touch."""
    if axis.axis_name != "x" or len(ticks) < 2 or not span:
        return True
    box = axis.axes.bbox
    distance = float(ticks[1] - ticks[0]) / span * box.width * POINTS / axis.figure.dpi
    widest = max(text_width(_write_tick(float(tick)), SMALL) for tick in ticks)
    return widest + SMALL / 2 <= distance
