"""What a command works on: what `module:callable` returns, or the content of a file."""

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import torch
from torch import Tensor

import tacit
from tacit.equations.files import EQUATIONS, format_of
from tacit.errors import InputError

Source = tacit.Objective | tacit.Target | tacit.Equations | tacit.watching.Watch
Result = tacit.Fit | tacit.identifiability.Screen | tacit.validation.Validation
HELP = (
    "return a tacit.Objective, as in tacit.Objective(model, loss, data); or two of them, with a "
    "technique and without it; or a Target, Equations or a watch."
)


class Call(NamedTuple):
    """A function of the user's, and the options that it can be given."""

    what: str
    function: Callable[..., Any]
    kinds: Mapping[str, Any] | None
    """The types of its parameters by name; None if it takes any."""


def load_source(
    spec: str, arguments: Sequence[str] = (), without: str | None = None
) -> Source | Result:
    """What a file holds, or what a callable returns; two objectives become their difference.

    Args:
        spec: a file of Target.save or Equations.save, module:callable, or file.py:callable.
        arguments: name=value for the callables, each for those that have such a parameter.
        without: module:callable of the objective without the technique.
    """
    if _is_file(spec):
        if arguments or without is not None:
            option = "--arg" if arguments else "--without"
            raise InputError(f"{spec} is a file, which takes no {option}: leave it out.")
        return load_file(spec)
    calls = [_find_callable(each) for each in (spec, without) if each is not None]
    options = _options_by_call(calls, arguments)
    loaded = [_call(call, each) for call, each in zip(calls, options, strict=True)]
    with own_errors(calls[0].what):
        return _join(loaded[0] if without is None else (loaded[0], loaded[1]), calls[0].what)


def load_file(path: str) -> tacit.Target | tacit.Equations:
    """The target or the equations in a file."""
    if format_of(path) == EQUATIONS:
        return tacit.Equations.load(path)
    return tacit.Target.load(path)


def load_weights(path: str) -> dict[str, Tensor]:
    """Parameters by name, from a file of safetensors or of torch.save(model.state_dict(), …)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file as load_safetensors

    remedy = "Pass a file of torch.save(model.state_dict(), …), or of safetensors."
    try:
        if Path(path).suffix == ".safetensors":
            weights = load_safetensors(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of unpickling, of all kinds
        expected = isinstance(error, OSError | SafetensorError)
        reason = str(error).splitlines()[0] if expected and str(error) else type(error).__name__
        raise InputError(f"{path} holds no weights ({reason}). {remedy}") from error
    if not isinstance(weights, Mapping) or not all(
        isinstance(tensor, Tensor) for tensor in weights.values()
    ):
        raise InputError(f"{path} holds a {type(weights).__name__}, not weights. {remedy}")
    return dict(weights)


def _is_file(spec: str) -> bool:
    """Whether this names a file of results, and no callable."""
    suffix = Path(spec).suffix
    try:
        return suffix == ".safetensors" or (suffix != ".py" and Path(spec).is_file())
    except ValueError:  # a zero byte
        return False


def _join(loaded: Any, what: str) -> Source | Result:
    """What was returned, checked; of two objectives the target of their difference."""
    if isinstance(loaded, Source | Result):
        return loaded
    if isinstance(loaded, tuple | list) and len(loaded) == 2:
        technique, plain = loaded
        if isinstance(technique, tacit.Objective) and isinstance(plain, tacit.Objective):
            return tacit.difference_target(technique, plain)
    name = type(loaded).__name__
    if isinstance(loaded, tuple | list):
        name += f" of {', '.join(type(each).__name__ for each in loaded[:4]) or 'nothing'}"
    raise InputError(f"{what} returned a {name}: {HELP}")


def _find_callable(spec: str) -> Call:
    """Import the module or the file, and look up the callable and its parameters."""
    what = f"objective {spec!r}"
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise InputError(f"{what}: write it as module:callable, or as path/file.py:callable.")
    is_path = place.endswith(".py")
    if is_path and not Path(place).is_file():
        raise InputError(f"{what}: there is no file {place}. Write path/file.py:callable.")
    with own_errors(what, remedy="Write module:callable, and run in the module's folder."):
        module = _import_file(Path(place)) if is_path else importlib.import_module(place)
        function: Any = module
        for name in attribute.split("."):
            function = getattr(function, name, None)
    if not callable(function):
        raise InputError(f"{what}: no callable {attribute!r}: name one that returns an Objective.")
    with own_errors(what, remedy="Name a function that returns a tacit.Objective."):
        return Call(what, function, _parameter_kinds(function))


def _import_file(path: Path) -> ModuleType:
    """Run a file as a module of its name; it can import its neighbours."""
    path = path.resolve()
    sys.path.insert(0, str(path.parent))
    name, known = path.stem, sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) != str(path):
        name = f"{path.stem} of {path.parent}"  # so that it replaces no other module
    elif known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _parameter_kinds(function: Callable[..., Any]) -> dict[str, Any] | None:
    """What the value of every parameter is parsed as; None if it takes any keyword."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except NameError:  # of an annotation that is only there for type checkers
        parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: _kind(p.annotation) for p in parameters if p.kind in named}


def _options_by_call(calls: Sequence[Call], arguments: Sequence[str]) -> list[dict[str, Any]]:
    """For every call the arguments that it has a parameter for, converted."""
    options: list[dict[str, Any]] = [{} for _ in calls]
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or not name:
            raise InputError(f"--arg {_shown(argument)}: write it as name=value.")
        takers = [i for i, call in enumerate(calls) if call.kinds is None or name in call.kinds]
        if not takers:
            names = ", ".join(dict.fromkeys(n for call in calls for n in call.kinds or ()))
            has = f"its parameters are {names}" if names else "it has no parameters"
            raise InputError(f"{calls[0].what} takes no --arg {_shown(name)}: {has}.")
        for taker in takers:
            if name in options[taker]:
                raise InputError(f"--arg {_shown(name)} was passed twice: pass it once.")
            kind = (calls[taker].kinds or {}).get(name, str)
            options[taker][name] = _convert(name, text, kind)
    return options


def _call(call: Call, options: Mapping[str, Any]) -> Any:
    """Call the user's function."""
    with own_errors(call.what, remedy="Name a function that returns a tacit.Objective."):
        try:
            inspect.signature(call.function).bind(**options)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{call.what} cannot be called like this ({error}): pass --arg name=value for "
                "every parameter without a default, or add defaults."
            ) from error
        loaded = call.function(**options)
        isinstance(loaded, tacit.Objective)  # raises here, where the user's class is at fault
        return loaded


def _kind(annotation: Any) -> Any:
    """What a value is parsed as: of several types the first that is no text, unless text is one."""
    if isinstance(annotation, str):
        return {"int": int, "float": float, "bool": bool, "Path": Path}.get(annotation, str)
    if get_origin(annotation) in (Union, UnionType):
        kinds = [_kind(each) for each in get_args(annotation) if each is not type(None)]
        return str if str in get_args(annotation) else kinds[0]
    if get_origin(annotation) is Literal or annotation in PARSERS:
        return annotation
    return str


PARSERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    Path: (Path, "a path"),
    str: (str, "a text"),
}
"""How the value of an argument is read, and what to pass, for each type."""


def _convert(name: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        parse, needed = choices.__getitem__, f"one of {', '.join(choices)}"
    else:
        parse, needed = PARSERS[kind]
        text = text.lower() if kind is bool else text
    try:
        return parse(text)
    except (ValueError, KeyError) as error:
        raise InputError(f"--arg {name} is {_shown(text)}: pass {needed}.") from error


def _shown(text: str, most: int = 80) -> str:
    """A text as it was typed, shortened for a message."""
    return repr(text if len(text) <= most else f"{text[:most]}…")


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
    """File and line of the last place that is not of Python, tacit or an installed package."""
    folders = [sysconfig.get_path("stdlib"), str(Path(tacit.__file__).parent)]
    others = ("<", *(f"{folder}{os.sep}" for folder in folders))
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):  # raised by Python, about a place in a file
        places.append((error.filename or "<unknown>", error.lineno))
    for filename, line in reversed(places):
        installed = {"site-packages", "dist-packages"} & {*Path(filename).parts}
        if not installed and not filename.startswith(others):
            return f"{filename}, line {line}"
    return None
