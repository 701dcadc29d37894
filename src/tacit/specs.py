"""What a user types on the command line, turned into an objective and regularizers."""

import importlib
import inspect
from typing import Any

import tacit
from tacit.errors import InputError

SIMPLE = ("l2", "l1", "smooth_l1", "group_l2", "nuclear_norm", "diagonal", "symmetric")
OF_OBJECTIVES = ("gradient_norm", "explicit_dropout")


def find_objective(spec: str) -> "tacit.Objective":
    """The Objective that `module:callable` returns."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise InputError(f"objective {spec!r}: write it as module:callable.")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError, SyntaxError) as error:
        raise InputError(
            f"objective {spec!r}: {error}. Write module:callable, and run from the folder that "
            "holds the module."
        ) from error
    if not callable(getattr(module, attribute, None)):
        raise InputError(f"objective {spec!r}: {module_name} has no callable {attribute!r}.")
    make = getattr(module, attribute)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise InputError(f"objective {spec!r} must need no arguments: {error}.") from error
    found = make()
    if not isinstance(found, tacit.Objective):
        raise InputError(
            f"objective {spec!r} returned a {type(found).__name__}: return a tacit.Objective."
        )
    return found


def parse_regularizer(spec: str, objective: "tacit.Objective") -> "tacit.Regularizer":
    """A regularizer from `name[:key=value,…]`, or `layerwise:` before one.

    >>> parse_regularizer("smooth_l1:beta=1e-3,scope=*.weight", None).name
    'smooth_l1'
    """
    name, _, rest = spec.partition(":")
    if name == "layerwise" and rest:
        return tacit.layerwise(parse_regularizer(rest, objective))
    given = [_option(part, spec) for part in rest.split(",")] if rest else []
    options = dict(given)
    if len(options) < len(given):
        raise InputError(f"{spec!r} gives an option twice: give each once.")
    if name in OF_OBJECTIVES:
        return _make(spec, getattr(tacit.regularizers, name), objective, **options)
    if name not in SIMPLE:
        known = ", ".join((*SIMPLE, *OF_OBJECTIVES, "layerwise:…"))
        raise InputError(f"no regularizer {name!r} in {spec!r}: there are {known}.")
    return _make(spec, getattr(tacit.regularizers, name), **options)


def parse_known(spec: str, objective: "tacit.Objective") -> tuple["tacit.Regularizer", float]:
    """A known penalty and its strength from `regularizer=strength`, as l2=5e-5."""
    name, _, text = spec.rpartition("=")
    try:
        strength = float(text)
    except ValueError as error:
        raise InputError(f"known penalty {spec!r}: write it as l2=5e-5.") from error
    return parse_regularizer(name, objective), strength


def _option(part: str, spec: str) -> tuple[str, Any]:
    key, equals, value = part.partition("=")
    if not equals or key not in ("beta", "scope", "name"):
        raise InputError(
            f"{part!r} in {spec!r} is no option: write key=value with beta, scope or name."
        )
    if key != "beta":
        return key, value
    try:
        return key, float(value)
    except ValueError as error:
        raise InputError(f"beta is {value!r} in {spec!r}: pass a number above zero.") from error


def _make(spec: str, family: Any, *given: Any, **options: Any) -> "tacit.Regularizer":
    try:
        return family(*given, **options)
    except TypeError as error:
        raise InputError(f"regularizer {spec!r} does not fit: {error}.") from error
