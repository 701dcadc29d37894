"""Coverage: how often nominal 95 % intervals hold the value that they should."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from tacit.fitting.fits import Fit
from tacit.objective.passes import track
from tacit_paper import Row, run_units
from tacit_paper import coverage_problems as problems
from tacit_paper.coverage_check import check as check
from tacit_paper.coverage_plot import plot as plot
from tacit_paper.coverage_problems import Problem
from tacit_paper.naive import naive_errors

TITLE = "Do the error bars hold what they promise?"

CAPTION = """
Nominal 95 % intervals against values that are known. Dots say how often an interval held the value,
with the 95 % range of such a count; crosses say the same of ordinary least-squares errors, which
take every parameter's equation for an independent observation. Each kind of error bar is put to the
chance that it names. Sampling: random parts of a fixed training set at fixed weights, and the value
is the strength on the whole set. Draws: masks or noise at fixed weights, and the value is their
mean over all of them. Steps: SGD with weight decay. Layers: layers that each have a strength of
their own, and the value is their mean. The moving design has a candidate, ‖∇L‖², that depends on
the examples itself. Error bars follow its column to first order, which is right while ∇L is larger
than its noise (early), and no longer when it is mostly noise (late).

Not in the paper. Error bars of training are in a figure of their own.
""".strip()


@dataclass(frozen=True)
class Config:
    """Sizes and settings."""

    replicates: int = 600
    first: int = 5000
    """Seed of the first replicate; earlier ones were looked at while the method was chosen."""
    examples: int = 1500
    part: int = 400
    """Examples of the whole set that a replicate sees."""
    draws: int = 16
    many: int = 4096
    steps: int = 60
    step_replicates: int = 500
    layers: int = 12


PAPER = Config()
QUICK = Config(
    replicates=60,
    examples=600,
    part=150,
    many=512,
    steps=40,
    step_replicates=20,
)


def units(config: Config) -> list[str]:
    """Pieces of work, in order."""
    return list(_work(config))


def run(config: Config, *, finished: Collection[str] = (), device: str = "cpu") -> Iterator[Row]:
    """Rows of every unit that is not finished."""
    work = {unit: partial(piece, config, device) for unit, piece in _work(config).items()}
    return run_units(work, finished)


def _work(config: Config) -> dict[str, Callable[[Config, str], Iterator[Row]]]:
    made: dict[str, Callable[[], Problem]] = {
        "sampling: regression": lambda: problems.regression(config.examples, config.part),
        "sampling: early": lambda: problems.moving(config.examples, config.part, late=False),
        "sampling: late": lambda: problems.moving(config.examples, config.part, late=True),
        "sampling: digits": lambda: problems.digits(config.examples, config.part),
        "sampling: transformer": lambda: problems.transformer(config.examples, config.part),
        "draws: dropout": lambda: problems.dropout(config.draws),
        "draws: input noise": lambda: problems.input_noise(config.draws, config.many),
        "steps": lambda: problems.steps(config.steps),
        "layers": lambda: problems.layers(config.layers),
    }
    return {unit: partial(_replicates, unit=unit, make=make) for unit, make in made.items()}


def _replicates(
    config: Config, device: str, *, unit: str, make: Callable[[], Problem]
) -> Iterator[Row]:
    """The same question again and again, each time with other luck."""
    problem = make()
    count = config.step_replicates if problem.kind == "steps" else config.replicates
    for number in track(range(count), total=count, label=unit):
        seed = config.first + number
        found, truth = problem.replicate(seed)
        own = {"kind": problem.kind, "problem": problem.label, "replicate": seed}
        yield from rows(own, found, truth)


def rows(own: Row, found: Fit, truth: dict[str, float]) -> Iterator[Row]:
    """One row a strength: its interval of this kind, and the naive one."""
    kind = str(own["kind"])
    naive = naive_errors(found.equations)
    for name, (low, high) in found.intervals()[kind].items():
        yield {
            **own,
            "name": name,
            "truth": truth[name],
            "estimate": found.strengths[name],
            "low": low,
            "high": high,
            "naive_error": naive[name],
        }
