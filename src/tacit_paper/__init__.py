"""The paper's figures, one folder each.

The folder of every figure exports:

- `Config`: a frozen dataclass of plain values. `PAPER` and `QUICK` are its two presets.
- `units(config)`: the names of the units of work, in order. An interruption loses at most one unit.
- `run(config, *, finished=(), device="cpu")`: yields rows. A row is a dictionary of plain values
  and has its unit's name in `unit`. Units in `finished` are skipped, which does not change the rows
  of the others. Columns that end in `_seconds` hold measured times. All other columns are the same
  in every run.
- `plot(rows)`: the figure, drawn only from the rows (a pandas DataFrame).
- `check(rows)`: key numbers beside their expected values.
- `TITLE`, `CAPTION`: text for the page of figures.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tacit.errors import InputError

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
)
"""Names of the experiments, in the order of the page. The folder has `_` instead of `-`."""

Row = dict[str, Any]
Table = Any
"""A pandas DataFrame of rows. Its type stubs do not cover how rows are filtered here."""


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
    TITLE: str
    CAPTION: str
    units: Callable[[Any], list[str]]
    run: Callable[..., Iterator[Row]]
    plot: Callable[[Any], Any]
    check: Callable[[Any], list[Check]]


def find_experiment(name: str) -> Experiment:
    """Import the experiment of this name."""
    if name not in EXPERIMENTS:
        raise InputError(f"no experiment {name!r}: choose from {', '.join(EXPERIMENTS)}.")
    return cast(Experiment, importlib.import_module(f"tacit_paper.{name.replace('-', '_')}"))


def pending(units: Iterable[str], finished: Collection[str]) -> Iterator[str]:
    """The units that are not finished, in order."""
    return (unit for unit in units if unit not in finished)


def run_units(
    work: Mapping[str, Callable[[], Iterable[Row]]], finished: Collection[str]
) -> Iterator[Row]:
    """Run every unit that is not finished and add the unit's name to its rows."""
    for unit in pending(work, finished):
        yield from ({"unit": unit, **row} for row in work[unit]())


def run_single_threaded(
    work: Mapping[str, Callable[[], Iterable[Row]]], finished: Collection[str]
) -> Iterator[Row]:
    """Do the same as `run_units`, with each unit computed on one thread.

    Operations on matrices as small as those of the least-squares figures take many times longer on
    several threads. The number of threads is restored before rows are yielded.
    """
    import torch  # imported here because the command line imports this module

    for unit in pending(work, finished):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            rows = list(work[unit]())
        finally:
            torch.set_num_threads(threads)
        yield from ({"unit": unit, **row} for row in rows)
