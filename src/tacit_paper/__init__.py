"""The paper's figures, one folder each.

The docstring of every figure's folder is the text of the figure: its title, then its caption. The
folder exports:

- `Config`: a frozen dataclass of plain values. `PAPER` and `QUICK` are its two presets.
- `work(config, device)`: the units of work by name, in order. A unit is a function that yields
  rows, dictionaries of plain values. An interruption loses at most one unit, and units do not
  depend on each other. Columns that end in `_seconds` hold measured times; all others are the same
  in every run.
- `plot(rows)`: the figure, drawn only from the rows (a pandas DataFrame).
- `check(rows)`: key numbers beside their expected values.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from tacit.errors import check_choice

EXPERIMENTS = (
    "tradeoff",
    "trajectory-deviations",
    "early-stopping",
    "bootstrap",
    "elastic-net",
    "step-size",
    "long-horizon",
    "dropout",
    "coverage",
    "training-coverage",
    "trust",
    "laws",
    "discovery",
)
"""Names of the experiments, in the order of the page. The folder has `_` instead of `-`."""

Row = dict[str, Any]
Table = Any
"""A pandas DataFrame of rows. Its type stubs do not cover how rows are filtered here."""


Work = dict[str, Callable[[], Iterable[Row]]]
"""Units of work by name, in order: functions that yield the rows of a unit."""


@dataclass(frozen=True)
class Check:
    """A key number of a figure beside its expected value."""

    label: str
    value: float
    expected: str
    holds: bool


class Experiment(Protocol):
    """The names that the folder of every figure exports."""

    Config: type
    PAPER: Any
    QUICK: Any
    work: Callable[[Any, str], Work]
    plot: Callable[[Any], Any]
    check: Callable[[Any], list[Check]]


def find_experiment(name: str) -> Experiment:
    """Import the experiment of this name."""
    check_choice("experiment", name, EXPERIMENTS)
    return cast(Experiment, importlib.import_module(f"tacit_paper.{name.replace('-', '_')}"))


def title_and_caption(experiment: Experiment) -> tuple[str, list[str]]:
    """The title of a figure and the paragraphs of its caption, from the folder's docstring."""
    title, *caption = (" ".join(p.split()) for p in (experiment.__doc__ or "").split("\n\n"))
    return title, caption


def on_one_thread(work: Work) -> Work:
    """The same units, each computed on one thread before its rows are yielded.

    Operations on matrices as small as those of the least-squares figures take many times longer on
    several threads.
    """
    return {unit: partial(_rows_on_one_thread, make_rows) for unit, make_rows in work.items()}


def _rows_on_one_thread(make_rows: Callable[[], Iterable[Row]]) -> list[Row]:
    import torch  # imported here because the command line imports this module

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return list(make_rows())
    finally:
        torch.set_num_threads(threads)
