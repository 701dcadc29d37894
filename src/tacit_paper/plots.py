"""Style and files of figures. matplotlib is imported only inside functions."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.display import figures
from tacit.errors import InputError
from tacit_paper import figure_plots, find_experiment, store
from tacit_paper.store import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = (
    figures.BLUE, figures.ORANGE, figures.GREEN, figures.RED, figures.GREY
)  # fmt: skip
STYLE = Path(__file__).with_name("figures.mplstyle")
FORMATS: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": None}
"""Formats of every figure, each with metadata that leaves out the date: its bytes are the same."""


@contextmanager
def style() -> Iterator[None]:
    """Draw in the library's style with larger letters, whatever the user's settings are."""
    import matplotlib as mpl

    with figures.style():
        mpl.rcParams.update(mpl.rc_params_from_file(STYLE, use_default_template=False))
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure without a window; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", folder: Path, name: str = "figure") -> list[Path]:
    """Write a figure in all formats, with the same bytes every time."""
    paths = {kind: folder / f"{name}.{kind}" for kind in FORMATS}
    with style():
        for kind, path in paths.items():
            write = partial(figure.savefig, format=kind, dpi=150, metadata=FORMATS[kind])
            store.write(path, write)
    return list(paths.values())


def are_drawn(result: Result) -> bool:
    """Whether a result has its figures in all formats."""
    names = figure_plots(find_experiment(result.metadata["experiment"]))
    return all((result.folder / f"{n}.{kind}").is_file() for n in names for kind in FORMATS)


def draw(result: Result) -> list[Path]:
    """Draw the figures of a result from its rows, and write them to the result's folder."""
    experiment = find_experiment(result.metadata["experiment"])
    with report_other_rows(result):
        drawn = {n: plot(result.rows) for n, plot in figure_plots(experiment).items()}
    return [path for name, figure in drawn.items() for path in save(figure, result.folder, name)]


@contextmanager
def report_other_rows(result: Result) -> Iterator[None]:
    """Turn what a figure or its checks raise on rows that they do not know into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"the rows in {result.folder} are not those of the figure ({str(error)[:200]}): "
            "another version of tacit may have written them. Run tacit reproduce --force."
        ) from error


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
