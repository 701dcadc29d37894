"""Rows of the coverage figures: intervals and true values of many replicates."""

from collections.abc import Callable, Iterator, Mapping

from tacit import Fit
from tacit.objective.passes import track
from tacit_paper import Row
from tacit_paper.coverage.cases import Case
from tacit_paper.coverage.config import Config
from tacit_paper.coverage.naive import naive_errors


def replicate_rows(
    config: Config, device: str, *, unit: str, make_case: Callable[[], Case]
) -> Iterator[Row]:
    """The rows of all replicates of one case; they differ only in their random draws."""
    case = make_case()
    count = config.step_replicates if case.source == "steps" else config.replicates
    for number in track(range(count), total=count, label=unit):
        seed = config.first + number
        replicate = {"kind": case.source, "problem": case.label, "replicate": seed}
        yield from interval_rows(replicate, case.replicate(seed), case.truth)


def interval_rows(replicate: Row, fit: Fit, truth: Mapping[str, float]) -> Iterator[Row]:
    """One row per strength: its estimate, interval, true value and naive standard error.

    Args:
        replicate: columns that identify the replicate; `kind` names the source of randomness whose
            interval is stored.
        fit: the fit, with error bars of that kind.
        truth: the true strengths by name.
    """
    naive = naive_errors(fit.equations)
    for name, (low, high) in fit.intervals()[replicate["kind"]].items():
        yield {
            **replicate,
            "name": name,
            "truth": truth[name],
            "estimate": fit.strengths[name],
            "low": low,
            "high": high,
            "naive_error": naive[name],
        }
