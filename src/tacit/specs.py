"""Parse the arguments of `tacit estimate` into an objective and regularizers."""

import importlib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import tacit
from tacit.errors import InputError
from tacit.objective.params import Scope
from tacit.regularizers.overview import CATALOGUE


def load_source(spec: str) -> "tacit.Objective | tacit.Target":
    """The target in a file of that name, or the objective that `module:callable` returns."""
    path = Path(spec)
    if path.suffix == ".safetensors" or path.is_file():
        return tacit.Target.load(path)
    return load_objective(spec)


def load_objective(spec: str) -> "tacit.Objective":
    """Import `module:callable` and return the Objective that the callable returns."""
    what = f"objective {spec!r}"
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise InputError(f"{what}: write it as module:callable.")
    with own_errors(what, remedy="Write module:callable, and run in the module's folder."):
        module = importlib.import_module(module_name)
        make_objective = getattr(module, attribute, None)
    if not callable(make_objective):
        raise InputError(f"{what}: no callable {attribute!r}: name one that returns an Objective.")
    with own_errors(what, remedy="Name a function that returns a tacit.Objective."):
        _check_signature(make_objective, what)
        objective = make_objective()
        is_objective = isinstance(objective, tacit.Objective)
    if not is_objective:
        raise InputError(
            f"{what} returned a {type(objective).__name__}: return a tacit.Objective, "
            "as in tacit.Objective(model, loss, data)."
        )
    return objective


def _check_signature(make_objective: Callable[[], Any], what: str) -> None:
    try:
        inspect.signature(make_objective).bind()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{what} cannot be called without arguments ({error}): add defaults."
        ) from error


@contextmanager
def own_errors(what: str, *, remedy: str | None = None) -> Iterator[None]:
    """Turn what the user's own code raises into an InputError that says where it was raised.

    Errors that did not pass through the user's code end with the remedy; without one they are
    left alone, because they are defects of tacit.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:
        place = _own_place(error)
        advice = remedy if place is None else f"Correct {place}."
        if advice is None:
            raise
        raise InputError(f"{what} raised {_describe(error)}. {advice}") from error


def _describe(error: BaseException) -> str:
    """The type of an error and the start of its message, if it has one."""
    try:
        message = str(error)[:500].rstrip(".")
    except Exception:  # of the user's own __str__
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _own_place(error: BaseException) -> str | None:
    """File and line of the last frame that is not of Python, tacit or an installed package."""
    folders = [sysconfig.get_path("stdlib"), str(Path(tacit.__file__).parent)]
    others = ("<", *(f"{folder}{os.sep}" for folder in folders))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        installed = {"site-packages", "dist-packages"} & {*Path(frame.filename).parts}
        if not installed and not frame.filename.startswith(others):
            return f"{frame.filename}, line {frame.lineno}"
    return None


def parse_regularizer(
    spec: str, objective: "tacit.Objective | tacit.Target"
) -> "tacit.Regularizer":
    """A regularizer from `name[:key=value,…]`, or `layerwise:` before one.

    The options are those of the function in tacit.regularizers. A scope is a pattern, several
    patterns separated by commas, or tacit.matrices.

    >>> parse_regularizer("smooth_l1:beta=1e-3,scope=*.weight", None).name
    'smooth_l1'
    """
    name, _, suffix = spec.partition(":")
    if name != "layerwise":
        return _make_regularizer(name, suffix, spec, objective)
    name, _, suffix = suffix.partition(":")
    if name in ("", "layerwise"):
        raise InputError(
            f"{_shown(spec)}: write layerwise: once, before the name of a family, as in "
            "layerwise:l2."
        )
    return tacit.layerwise(_make_regularizer(name, suffix, spec, objective))


def _make_regularizer(
    name: str, suffix: str, spec: str, objective: "tacit.Objective | tacit.Target"
) -> "tacit.Regularizer":
    """Call a function of tacit.regularizers with the options that were typed."""
    factories = _factories()
    if name not in factories:
        names = ", ".join((*factories, "layerwise:…"))
        raise InputError(
            f"no regularizer {_shown(name)} in {_shown(spec)}: choose from {names}. Others need "
            "Python objects: use them from Python."
        )
    factory, kinds = factories[name]
    options = _parse_options(suffix, kinds, spec) if suffix else {}
    parameters = inspect.signature(factory).parameters
    required = [n for n, p in parameters.items() if p.default is p.empty and n != "objective"]
    if missing := [n for n in required if n not in options]:
        example = ",".join(f"{n}=…" for n in missing)
        raise InputError(f"{_shown(spec)} lacks an option: write {name}:{example}.")
    if "objective" not in parameters:
        return factory(**options)
    if isinstance(objective, tacit.Target):
        raise InputError(
            f"{_shown(spec)} depends on data, which a file of Target.save does not have: use "
            "tacit.Target.load from Python, and make the regularizer of an objective there."
        )
    return factory(objective, **options)


Factory = Callable[..., "tacit.Regularizer"]


def _factories() -> dict[str, tuple[Factory, dict[str, Any]]]:
    """The families that can be typed, and the types of those of their options that can be.

    These are the families of the catalogue that need only weights, the objective and options.
    """
    factories = {}
    for entry in CATALOGUE:
        factory = getattr(tacit.regularizers, entry.name, None)
        if factory is None:
            continue
        parameters = inspect.signature(factory, eval_str=True).parameters
        kinds = {n: k for n, p in parameters.items() if (k := _kind(p.annotation)) is not None}
        needed = {n for n, p in parameters.items() if p.default is p.empty} - {"objective"}
        if needed <= kinds.keys():
            factories[entry.name] = (factory, kinds)
    return factories


def _kind(annotation: Any) -> Any:
    """What an option is parsed as: float, int, bool, str, the choices of a Literal, or PATTERNS.

    None for options that cannot be typed.
    """
    if annotation == Scope:
        return PATTERNS
    if get_origin(annotation) in (Union, UnionType):
        alternatives = [a for a in get_args(annotation) if a is not type(None)]
        if str in alternatives and len(alternatives) > 1:  # one pattern, or a list of them
            return PATTERNS
        kinds = [kind for a in alternatives if (kind := _kind(a)) is not None]
        return kinds[0] if len(kinds) == 1 else None
    return annotation if annotation in PARSERS or get_origin(annotation) is Literal else None


def parse_known(
    spec: str, objective: "tacit.Objective | tacit.Target"
) -> tuple["tacit.Regularizer", float]:
    """A known penalty and its strength from `regularizer=strength`, such as l2=5e-5."""
    regularizer, _, number = spec.rpartition("=")
    try:
        strength = float(number)
    except ValueError as error:
        raise InputError(f"known penalty {spec!r}: write it as l2=5e-5.") from error
    return parse_regularizer(regularizer, objective), strength


def _parse_options(suffix: str, kinds: dict[str, Any], spec: str) -> dict[str, Any]:
    """Options from `key=value,…`; the value of a scope may be several patterns."""
    texts: dict[str, list[str]] = {}
    names = list(kinds)  # at least scope and name
    key = ""
    for part in suffix.split(","):
        if kinds.get(key) == PATTERNS and "=" not in part:
            texts[key].append(part)
            continue
        key, equals, value = part.partition("=")
        if not equals or key not in kinds:
            raise InputError(
                f"{_shown(part)} in {_shown(spec)} is not an option: write key=value with "
                f"{' or '.join((', '.join(names[:-1]), names[-1]))}."
            )
        if key in texts:
            raise InputError(f"{_shown(spec)} has the same option twice: write each option once.")
        texts[key] = [value]
    return {key: _parse_option(key, values, kinds[key], spec) for key, values in texts.items()}


def _parse_option(key: str, values: list[str], kind: Any, spec: str) -> Any:
    """One option in its type."""
    if kind == PATTERNS:
        return tacit.matrices if values == ["tacit.matrices"] else values
    (text,) = values
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        parse, needed = choices.__getitem__, f"one of {', '.join(choices)}"
    else:
        parse, needed = PARSERS[kind]
    try:
        return parse(text)
    except (ValueError, KeyError) as error:
        raise InputError(f"{key} is {_shown(text)} in {_shown(spec)}: pass {needed}.") from error


PATTERNS = "patterns"
"""The kind of options that are one or several name patterns."""
PARSERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    float: (float, "a number"),
    int: (int, "a whole number"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
    str: (str, "a name"),
}
"""How an option is read from text, and what to pass, for each type."""


def _shown(text: str, most: int = 80) -> str:
    """A text as it was typed, shortened for a message."""
    return repr(text if len(text) <= most else f"{text[:most]}…")
