"""The `tacit` command: `estimate`, `catalogue`, and the commands that installed packages add.

A package adds commands by an entry point of the group `tacit.commands`: a function that is called
with the app. Names of tacit are imported inside the commands, so that `tacit --help` does not wait
for torch.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

import tacit
from tacit.atomic import write_atomically
from tacit.errors import InputError


def build_app(extra_commands: Iterable[Callable[[typer.Typer], None]] = ()) -> typer.Typer:
    """The app with the commands of this module, of installed packages, and of `extra_commands`."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Estimate the regularization that a training run applied without writing it down.",
    )
    app.callback()(_global_options)
    app.command()(estimate)
    app.command()(catalogue)
    installed = [entry_point.load() for entry_point in entry_points(group="tacit.commands")]
    for add_commands in dict.fromkeys([*installed, *extra_commands]):  # each only once
        add_commands(app)
    return app


@contextmanager
def report_errors(interrupted: str = "interrupted.") -> Iterator[None]:
    """Turn an InputError into one line and exit code 2, and an interruption into exit code 130.

    Files that cannot be read or written are one line too, also where the output is a full disk.
    """
    try:
        _prepare_output()
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        raise  # the reader of a pipe left: typer ends quietly
    except (InputError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        _drop_output()
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(130) from None


def _prepare_output() -> None:
    """Have an output even where it was closed, and one that can show every character."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 # until the process ends
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Where the output cannot be written, discard it: Python would complain at its end."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"tacit {tacit.__version__}")
        raise typer.Exit


VERSION = typer.Option(
    "--version", help="Print the version.", callback=_print_version, is_eager=True
)


def _global_options(version: Annotated[bool, VERSION] = False) -> None:
    pass


@report_errors()
def estimate(
    objective: Annotated[
        str,
        typer.Argument(help="module:callable that returns an Objective, or a file of Target.save."),
    ],
    candidates: Annotated[
        list[str],
        typer.Option("--with", help="l2, schatten:p=1, layerwise:l2, …; see tacit catalogue."),
    ],
    known: Annotated[
        list[str] | None, typer.Option(help="A penalty that training applied, such as l2=5e-5.")
    ] = None,
    nonnegative: Annotated[
        bool, typer.Option(help="Constrain strengths to be at least zero.")
    ] = False,
    psd: Annotated[
        bool, typer.Option(help="Constrain the matrix of symmetric to be positive semidefinite.")
    ] = False,
    population: Annotated[
        float | None,
        typer.Option(help="Population size, or inf: adds standard errors of sampling."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the fit to this file.")
    ] = None,
) -> None:
    """Estimate strengths at the objective's parameters, or of a target, and print the summary."""
    from tacit.specs import load_source, own_errors, parse_known, parse_regularizer

    if json_file is not None:
        json_file = json_file.absolute()  # the user's code may change the folder
        if json_file.is_dir():
            raise InputError(f"{json_file} cannot be written to: it is a folder. Choose a file.")
    loaded = load_source(objective)
    regularizers = [parse_regularizer(spec, loaded) for spec in candidates]
    penalties = dict(parse_known(spec, loaded) for spec in known or [])
    with own_errors(f"objective {objective!r}"):
        fit = tacit.estimate(
            loaded,
            regularizers,
            known=penalties,
            nonnegative=nonnegative,
            psd=psd,
            population=population,
        )
    stream = None if json_file is None else _find_stream(json_file)
    try:
        if json_file is not None:
            _write_json(json_file, fit.to_dict(), stream)
    finally:  # the summary is not lost where the file cannot be written
        print(fit.summary(), file=sys.stderr if stream is sys.stdout else sys.stdout)


@report_errors()
def catalogue() -> None:
    """List all regularizers: formula, cost, error bars, and what each is mistaken for."""
    tacit.regularizers.catalogue()


def _find_stream(path: Path) -> TextIO | None:
    """The output or the errors, if the path is one of them: /dev/stdout, also if that is a file."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or no file
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return stream
    return None


def _write_json(path: Path, content: dict[str, Any], stream: TextIO | None) -> None:
    """Write to the stream, or write a file completely or not at all."""
    text = json.dumps(content, indent=2) + "\n"
    if stream is not None:
        print(text, end="", file=stream)
    else:
        remedy = "Choose another file."
        write_atomically(path, lambda partial: partial.write_text(text), remedy=remedy)
