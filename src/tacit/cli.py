"""The `tacit` command: `estimate`, and the commands that installed packages add.

A package adds commands by an entry point of the group `tacit.commands`: a function that is called
with the app. Names of tacit are imported inside the commands, so that `tacit --help` does not wait
for torch.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

import tacit
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
    installed = [entry_point.load() for entry_point in entry_points(group="tacit.commands")]
    for add_commands in dict.fromkeys([*installed, *extra_commands]):  # each only once
        add_commands(app)
    return app


@contextmanager
def report_errors(interrupted: str = "interrupted.") -> Iterator[None]:
    """Turn an InputError into one line and exit code 2, and an interruption into exit code 130."""
    try:
        yield
    except InputError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(130) from None


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
    objective: Annotated[str, typer.Argument(help="module:callable that returns an Objective.")],
    candidates: Annotated[
        list[str], typer.Option("--with", help="l2, smooth_l1:beta=1e-3, layerwise:l2, …")
    ],
    known: Annotated[
        list[str] | None, typer.Option(help="A penalty that training applied, such as l2=5e-5.")
    ] = None,
    nonnegative: Annotated[
        bool, typer.Option(help="Constrain strengths to be at least zero.")
    ] = False,
    population: Annotated[
        float | None,
        typer.Option(help="Population size, or inf: adds standard errors of sampling."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the fit to this file.")
    ] = None,
) -> None:
    """Estimate strengths at the objective's parameters and print the summary."""
    from tacit.specs import load_objective, parse_known, parse_regularizer

    loaded = load_objective(objective)
    regularizers = [parse_regularizer(spec, loaded) for spec in candidates]
    penalties = dict(parse_known(spec, loaded) for spec in known or [])
    fit = tacit.estimate(
        loaded, regularizers, known=penalties, nonnegative=nonnegative, population=population
    )
    if json_file is not None:
        _write_text(json_file, json.dumps(fit.to_dict(), indent=2) + "\n")
    print(fit.summary())


def _write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    try:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text)
        partial.replace(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be written ({error}). Choose another file.") from error
