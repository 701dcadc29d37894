"""The paper's figures, one folder each.

The docstring of every figure's folder is the text of the figure: its title, a caption of at most 80
words, then details. The folder exports:

- `Config`: a frozen dataclass of plain values. `PAPER` and `QUICK` are its two presets.
- `work(config, device)`: the units of work by name, in order. A unit is a function that yields
  rows, dictionaries of plain values. An interruption loses at most one unit, and units do not
  depend on each other. Columns that end in `_seconds` or `_bytes` hold measured times and memory;
  all others are the same in every run.
- `FIGURE`: its number in the paper, such as `Figure 3`, or `New`.
- `plot(rows)`: the figure, drawn only from the rows (a pandas DataFrame). A folder may also export
  `plot_details(rows)`, a second figure that is shown below the first.
- `check(rows)`: key numbers beside their expected values.
- `CLAIMS`: what the paper says here, each with a verdict and the number that decides it.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, cast

from tacit.errors import check_choice

EXPERIMENTS = (
    "tradeoff",
    "trajectory-deviations",
    "elastic-net",
    "early-stopping",
    "dropout",
    "dropout-moments",
    "step-size",
    "bootstrap",
    "long-horizon",
    "averaging",
    "coverage",
    "training-coverage",
    "trust",
    "laws",
    "discovery",
    "screening",
    "scaling",
)
"""Names of the experiments: the paper's figures in its order, then new ones; dropout by moments
follows the figure that it continues.

The folder has `_` instead of `-`."""

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
    tests: Literal["protocol", "expectation"] = "expectation"
    """What failed if the number does not hold: the paper's protocol, or our expectation."""

    @property
    def answer(self) -> str:
        """Whether the number holds, and what failed where it does not."""
        blamed = {"protocol": "the paper's protocol", "expectation": "our expectation"}
        return "yes" if self.holds else f"no: {blamed[self.tests]}"


@dataclass(frozen=True)
class Evidence:
    """The numbers that decide a claim, in words, and whether they agree with its verdict."""

    text: str
    agrees: bool


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, our verdict, and the numbers that decide it."""

    statement: str
    """What the paper says, in its words or close to them, in one sentence."""
    place: str
    """Where it says so, such as `Figure 5` or `App. A`."""
    verdict: Literal["holds", "holds with a caveat", "artefact", "not tested"]
    measure: Callable[[Table], Evidence | None]
    """Numbers from rows; None where the rows lack what the claim is about, as in a small preset."""
    caveat: str = ""
    """One sentence: what limits the claim, or what produced the artefact."""
    headline: bool = False
    """Whether it is among the claims at the top of `docs/claims.md`; at most ten."""


class Experiment(Protocol):
    """The names that the folder of every figure exports."""

    Config: type
    PAPER: Any
    QUICK: Any
    FIGURE: str
    CLAIMS: Sequence[Claim]
    work: Callable[[Any, str], Work]
    plot: Callable[[Any], Any]
    check: Callable[[Any], list[Check]]


def find_experiment(name: str) -> Experiment:
    """Import the experiment of this name."""
    check_choice("experiment", name, EXPERIMENTS)
    return cast(Experiment, importlib.import_module(f"tacit_paper.{name.replace('-', '_')}"))


class Text(NamedTuple):
    """What a folder's docstring says: title, caption, and the paragraphs of the details."""

    title: str
    caption: str
    details: list[str]


def read_text(experiment: Experiment) -> Text:
    """The text of a figure, from the folder's docstring."""
    paragraphs = [" ".join(p.split()) for p in (experiment.__doc__ or "").split("\n\n")]
    title, caption, *details = [*paragraphs, "", ""][: max(2, len(paragraphs))]
    return Text(title, caption, details)


def figure_plots(experiment: Experiment) -> dict[str, Callable[[Table], Any]]:
    """What draws the figures of an experiment, by their files: `figure`, and perhaps `details`."""
    plot_details = getattr(experiment, "plot_details", None)
    return {"figure": experiment.plot, **({"details": plot_details} if plot_details else {})}


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
