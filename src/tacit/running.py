"""What the commands compute from a source, and how they show it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import tacit
from tacit.display import render
from tacit.display.frames import write_csv
from tacit.errors import InputError
from tacit.fitting.fit_rows import layer_rows, strength_rows
from tacit.fitting.layer_table import summarize_layers
from tacit.fitting.summary import jsonable
from tacit.identifiability import Screen
from tacit.identifiability.screen_text import screen_rows
from tacit.loading import Result, Source, load_source, load_weights, own_errors
from tacit.regularizers.family import Cost
from tacit.reporting.result_page import Reportable
from tacit.specs import check_specs, parse_known, parse_regularizer
from tacit.uncertainty.scores import with_sampling_errors
from tacit.validation import Validation
from tacit.watching import Watch
from tacit.watching.watch_text import watch_rows

NO_CANDIDATES = (
    "--with is missing: name the penalties, as in --with l2 --with smooth_l1:beta=1e-3 (tacit "
    "catalogue lists them), or use tacit screen, which tries them all."
)


class Question(NamedTuple):
    """Where a command takes its data from, as it was typed."""

    source: str
    arguments: tuple[str, ...] = ()
    without: str | None = None

    def load(self) -> Source | Result:
        """The source itself."""
        return load_source(self.source, self.arguments, self.without)

    @property
    def name(self) -> str:
        """How errors name it."""
        return f"objective {self.source!r}"


def fit_source(
    question: Question, candidates: Sequence[str], known: Sequence[str], **options: Any
) -> tacit.Fit:
    """The fit of `tacit estimate`; options are those of `tacit.estimate`."""
    check_specs(candidates, known)
    return _fit(question, question.load(), candidates, known, options)


def screen_source(
    question: Question, known: Sequence[str], *, start: Path | None = None, cost: str | None = None
) -> Screen:
    """The screen of `tacit screen`."""
    check_specs((), known)
    weights = None if start is None else load_weights(str(start.absolute()))
    return _screen(question, question.load(), known, weights, cost)


def result_of_source(
    question: Question, candidates: Sequence[str], known: Sequence[str]
) -> Reportable:
    """What `tacit report` is of: a result, the fit of candidates, a watch, or a screen."""
    check_specs(candidates, known)
    loaded = question.load()
    if isinstance(loaded, Result):
        _refuse(f"a {type(loaded).__name__}", {"--with": candidates, "--known": known})
        return loaded
    if isinstance(loaded, Watch) and not candidates:
        _refuse("a watch without --with", {"--known": known})
        _ = loaded.fit  # refused where there is no row yet
        return loaded
    if candidates or isinstance(loaded, tacit.Equations):
        return _fit(question, loaded, candidates, known, {})
    return _screen(question, loaded, known, None, None)


def _fit(
    question: Question,
    loaded: Source | Result,
    candidates: Sequence[str],
    known: Sequence[str],
    options: dict[str, Any],
) -> tacit.Fit:
    if isinstance(loaded, Watch):
        loaded = loaded.target() if candidates else loaded.fit.equations
    if isinstance(loaded, tacit.Equations):
        _refuse("equations", {"--with": candidates, "--known": known})
        constraints = {name: options.get(name, False) for name in ("nonnegative", "psd")}
        fit = tacit.fit(loaded, **constraints)
        return with_sampling_errors(fit, options.get("population"))
    if not isinstance(loaded, tacit.Objective | tacit.Target):
        raise InputError(
            f"{question.name} returned a {type(loaded).__name__}, which is a result already: write "
            "its page with tacit report."
        )
    if not candidates:
        raise InputError(NO_CANDIDATES)
    regularizers = [parse_regularizer(spec, loaded) for spec in candidates]
    penalties = dict(parse_known(spec, loaded) for spec in known)
    with own_errors(question.name):
        return tacit.estimate(loaded, regularizers, known=penalties or None, **options)


def _screen(
    question: Question,
    loaded: Source | Result,
    known: Sequence[str],
    start: dict[str, Any] | None,
    cost: str | None,
) -> Screen:
    if isinstance(loaded, Result):
        raise InputError(
            f"{question.name} returned a {type(loaded).__name__}, which is a result already: "
            "return what it was made from."
        )
    if isinstance(loaded, tacit.Equations):
        _refuse("equations", {"--known": known, "--start": start, "--cost": cost})
        return tacit.screen(loaded)
    target = loaded.target() if isinstance(loaded, Watch) else loaded
    penalties = dict(parse_known(spec, target) for spec in known)
    cost = cast(Cost, cost or "pass")
    with own_errors(question.name):
        return tacit.screen(target, start=start, known=penalties or None, cost=cost)


def _refuse(what: str, options: dict[str, Any]) -> None:
    """Refuse options that this source has already, or cannot have."""
    if passed := [option for option, value in options.items() if value]:
        raise InputError(
            f"{' and '.join(passed)} cannot be passed with {what}: what is estimated is settled "
            "there already. Leave it out."
        )


def describe(result: Reportable, by: str) -> tuple[str, dict[str, Any]]:
    """The summary and the content of JSON."""
    if isinstance(result, Watch):
        rows = jsonable(watch_rows(result.rows))
        return result.summary(), {"rows": rows, "problems": [*map(asdict, result.problems)]}
    text, content = result.summary(), result.to_dict()
    if by == "layer" and isinstance(result, tacit.Fit):
        text += f"\n\n{render(summarize_layers(result))}"
        content["layers"] = jsonable(layer_rows(result))
    return text, content


def table(result: Reportable, by: str) -> str:
    """The table of a result as text with commas: the rows of its `to_frame`."""
    if isinstance(result, tacit.Fit):
        rows = strength_rows(result) if by == "strength" else layer_rows(result)
        return write_csv(rows, "verdict")
    if isinstance(result, Screen):
        return write_csv(screen_rows(result))
    if isinstance(result, Validation):
        models = {"penalised": result.penalised, "control": result.control}
        return write_csv([{"model": name, **asdict(model)} for name, model in models.items()])
    return write_csv(watch_rows(result.rows), "verdict")
