"""Parse the arguments of `tacit estimate` into an objective and regularizers."""

import importlib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tacit
from tacit.errors import InputError

WITHOUT_OBJECTIVE = ("l2", "l1", "smooth_l1", "group_l2", "nuclear_norm", "diagonal", "symmetric")
WITH_OBJECTIVE = ("gradient_norm", "explicit_dropout", "hessian_trace")
"""Regularizers whose first argument is the objective."""


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


def parse_regularizer(spec: str, objective: "tacit.Objective") -> "tacit.Regularizer":
    """A regularizer from `name[:key=value,…]`, or `layerwise:` before one.

    A scope is a pattern, several patterns separated by commas, or tacit.matrices.

    >>> parse_regularizer("smooth_l1:beta=1e-3,scope=*.weight", None).name
    'smooth_l1'
    """
    name, _, suffix = spec.partition(":")
    if name == "layerwise" and suffix:
        return tacit.layerwise(parse_regularizer(suffix, objective))
    options = _parse_options(suffix, spec) if suffix else {}
    if name not in (*WITHOUT_OBJECTIVE, *WITH_OBJECTIVE):
        names = ", ".join((*WITHOUT_OBJECTIVE, *WITH_OBJECTIVE, "layerwise:…"))
        raise InputError(f"no regularizer {name!r} in {spec!r}: choose from {names}.")
    arguments = [objective] if name in WITH_OBJECTIVE else []
    try:
        return getattr(tacit.regularizers, name)(*arguments, **options)
    except TypeError as error:
        raise InputError(f"{spec!r} has a missing or an unknown option: {error}.") from error


def parse_known(spec: str, objective: "tacit.Objective") -> tuple["tacit.Regularizer", float]:
    """A known penalty and its strength from `regularizer=strength`, such as l2=5e-5."""
    regularizer, _, number = spec.rpartition("=")
    try:
        strength = float(number)
    except ValueError as error:
        raise InputError(f"known penalty {spec!r}: write it as l2=5e-5.") from error
    return parse_regularizer(regularizer, objective), strength


def _parse_options(suffix: str, spec: str) -> dict[str, Any]:
    """Options from `key=value,…`; the value of scope may be several patterns."""
    options: dict[str, Any] = {}
    key = ""
    for part in suffix.split(","):
        if key == "scope" and "=" not in part:
            options[key] += [part]
            continue
        key, equals, value = part.partition("=")
        if not equals or key not in ("beta", "scope", "name"):
            raise InputError(
                f"{part!r} in {spec!r} is not an option: write key=value with beta, scope or name."
            )
        if key in options:
            raise InputError(f"{spec!r} has the same option twice: write each option once.")
        options[key] = [value] if key == "scope" else value
    if "beta" in options:
        options["beta"] = _parse_beta(options["beta"], spec)
    if options.get("scope") == ["tacit.matrices"]:
        options["scope"] = tacit.matrices
    return options


def _parse_beta(value: str, spec: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise InputError(f"beta is {value!r} in {spec!r}: pass a number above zero.") from error
