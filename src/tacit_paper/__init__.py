"""The paper's figures, one file each.

Every module here exports:

- `Config`: a frozen dataclass of plain values; `PAPER` and `QUICK` are two of it.
- `units(config)`: names of the pieces of work, in order. A piece is what an interruption may lose.
- `run(config, *, finished=(), device="cpu")`: yields rows, dictionaries of plain values, each with
  its `unit`; units in `finished` are left out, and do not change what the others yield. Measured
  times are in columns that end in `_seconds`: all else is the same at every run.
- `plot(rows)`: a figure from the rows (a pandas DataFrame) alone.
- `check(rows)`: key numbers against the expected ones.
- `TITLE`, `CAPTION`: plain words for the page.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tacit.errors import InputError

MODULES = {
    "tradeoff": "tradeoff",
    "trajectory-deviations": "trajectory_deviations",
    "early-stopping": "early_stopping",
    "bootstrap": "bootstrap",
    "elastic-net": "elastic_net",
    "step-size": "step_size",
    "long-horizon": "long_horizon",
    "dropout": "dropout",
    "coverage": "coverage",
    "training-coverage": "training_coverage",
}

Row = dict[str, Any]
Table = Any
"""A pandas DataFrame of rows, whose type stubs cannot follow how it is filtered."""


@dataclass(frozen=True)
class Check:
    """A key number beside what is expected of it."""

    label: str
    value: float
    expected: str
    holds: bool


class Experiment(Protocol):
    """What every module of this package exports."""

    Config: type
    PAPER: Any
    QUICK: Any
    TITLE: str
    CAPTION: str
    units: Callable[[Any], list[str]]
    run: Callable[..., Iterator[Row]]
    plot: Callable[[Any], Any]
    check: Callable[[Any], list[Check]]


def load(name: str) -> Experiment:
    """The experiment of that name."""
    if name not in MODULES:
        raise InputError(f"no experiment {name!r}: there are {', '.join(MODULES)}.")
    return cast(Experiment, importlib.import_module(f"tacit_paper.{MODULES[name]}"))


def pending(units: Iterable[str], finished: Collection[str]) -> Iterator[str]:
    """The units that are still to be run."""
    return (unit for unit in units if unit not in finished)


def run_units(
    work: Mapping[str, Callable[[], Iterable[Row]]], finished: Collection[str]
) -> Iterator[Row]:
    """Rows of every unit that is not finished, each with its unit."""
    for unit in pending(work, finished):
        yield from ({"unit": unit, **row} for row in work[unit]())


def run_small(
    work: Mapping[str, Callable[[], Iterable[Row]]], finished: Collection[str]
) -> Iterator[Row]:
    """Rows of every unit that is not finished, each unit computed on one thread.

    Matrices as small as those of the least-squares figures take many times longer on several.
    """
    import torch

    for unit in pending(work, finished):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            rows = list(work[unit]())
        finally:
            torch.set_num_threads(threads)
        yield from ({"unit": unit, **row} for row in rows)
