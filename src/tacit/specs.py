"""Regularizers as they are typed on the command line."""

import inspect
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import tacit
from tacit.errors import InputError
from tacit.objective.params import Scope
from tacit.regularizers.overview import CATALOGUE


def parse_regularizer(
    spec: str, objective: "tacit.Objective | tacit.Target"
) -> "tacit.Regularizer":
    """A regularizer from `name[:key=value,…]`, or `layerwise:` before one.

    The options are those of the function in tacit.regularizers. A scope is a pattern, several
    patterns separated by commas, or tacit.matrices.

    >>> parse_regularizer("smooth_l1:beta=1e-3,scope=*.weight", None).name
    'smooth_l1'
    """
    factory, options, by_layer = _read(spec)
    if "objective" in inspect.signature(factory).parameters:
        regularizer = factory(_objective_of(objective, spec), **options)
    else:
        regularizer = factory(**options)
    return tacit.layerwise(regularizer) if by_layer else regularizer


def check_specs(candidates: Sequence[str], known: Sequence[str]) -> None:
    """Refuse unknown names and options before the user's code runs, which may train a model."""
    for spec in [*candidates, *(_read_known(spec)[0] for spec in known)]:
        _read(spec)


def _read(spec: str) -> "tuple[Factory, dict[str, Any], bool]":
    """A function of tacit.regularizers, its options, and whether it is layerwise."""
    name, _, suffix = spec.partition(":")
    by_layer = name == "layerwise"
    if by_layer:
        name, _, suffix = suffix.partition(":")
        if name in ("", "layerwise"):
            raise InputError(
                f"{_shown(spec)}: write layerwise: once, before the name of a family, as in "
                "layerwise:l2."
            )
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
    return factory, options, by_layer


def _objective_of(source: "tacit.Objective | tacit.Target | None", spec: str) -> "tacit.Objective":
    """The objective whose data a regularizer depends on."""
    if isinstance(source, tacit.Target):
        source = source.setting.plain or source.setting.computed_from
    if source is None:
        raise InputError(
            f"{_shown(spec)} depends on data, which a file of Target.save does not have: use "
            "tacit.Target.load from Python, and make the regularizer of an objective there."
        )
    return source


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
    regularizer, strength = _read_known(spec)
    return parse_regularizer(regularizer, objective), strength


def _read_known(spec: str) -> tuple[str, float]:
    regularizer, _, number = spec.rpartition("=")
    try:
        return regularizer, float(number)
    except ValueError as error:
        raise InputError(f"known penalty {_shown(spec)}: write it as l2=5e-5.") from error


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
