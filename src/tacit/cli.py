"""The `tacit` command: what it can be asked, and the commands that installed packages add.

A package adds commands by an entry point of the group `tacit.commands`: a function that is called
with the app. Names of tacit are imported inside the commands, so that `tacit --help` does not wait
for torch.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

import tacit
from tacit.errors import InputError, check_choice
from tacit.outputs import (
    Outputs,
    check_outputs,
    find_stream,
    only_results,
    print_result,
    write_text,
)


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
    app.command()(screen)
    app.command()(report)
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


SOURCE = typer.Argument(
    help="MODULE:CALLABLE or FILE.py:CALLABLE, which returns an Objective (or two: with a "
    "technique and without it), a Target, Equations or a watch; or a file of Target.save or "
    "Equations.save.",
    metavar="SOURCE",
    show_default=False,
)
WITH = typer.Option(
    "--with", metavar="REGULARIZER", help="l2, schatten:p=1, layerwise:l2, …; see tacit catalogue."
)
Source = Annotated[str, SOURCE]
Candidates = Annotated[list[str] | None, WITH]
Known = Annotated[
    list[str] | None,
    typer.Option(metavar="PENALTY=X", help="A penalty that training applied, such as l2=5e-5."),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        metavar="NAME=VALUE",
        help="For the callable; converted to int, float, bool or Path by its annotations.",
    ),
]
Without = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:CALLABLE",
        help="The objective without the technique: what SOURCE adds to it is estimated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of the summary.")]
Html = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Also write a page: one HTML file; - prints it.")
]
Csv = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Also write the table as CSV; - prints it.")
]
Cost = Annotated[
    str | None,
    typer.Option(
        help="What candidates may cost: weights, pass or second-order.", show_default="pass"
    ),
]


@report_errors()
def estimate(  # noqa: PLR0913 # the options of the command
    source: Source,
    candidates: Candidates = None,
    known: Known = None,
    nonnegative: Annotated[
        bool, typer.Option("--nonnegative", help="Constrain strengths to be at least zero.")
    ] = False,
    psd: Annotated[
        bool,
        typer.Option("--psd", help="Constrain the matrix of symmetric to be semidefinite."),
    ] = False,
    population: Annotated[
        float | None,
        typer.Option(help="Population size, or inf: adds standard errors of sampling."),
    ] = None,
    by: Annotated[
        str, typer.Option(help="strength; or layer: also every layer by itself.")
    ] = "strength",
    arguments: Arguments = None,
    without: Without = None,
    json: Json = False,
    html: Html = None,
    csv: Csv = None,
) -> None:
    """Estimate the strengths of penalties that you name, and print the summary."""
    from tacit.running import Question, fit_source

    check_choice("--by", by, ("strength", "layer"))
    outputs = check_outputs(as_json=json, html=html, csv=csv)
    question = Question(source, tuple(arguments or ()), without)
    with only_results():
        fit = fit_source(
            question,
            candidates or [],
            known or [],
            nonnegative=nonnegative,
            psd=psd,
            population=population,
        )
    _write(outputs, fit, by)


@report_errors()
def screen(  # noqa: PLR0913 # the options of the command
    source: Source,
    known: Known = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Weights that training started from: a file of torch or safetensors."),
    ] = None,
    cost: Cost = None,
    arguments: Arguments = None,
    without: Without = None,
    json: Json = False,
    html: Html = None,
    csv: Csv = None,
) -> None:
    """Test all families of the catalogue: which regularization is in the model?"""
    from tacit.running import Question, screen_source

    if cost is not None:
        check_choice("--cost", cost, ("weights", "pass", "second-order"))
    outputs = check_outputs(as_json=json, html=html, csv=csv)
    question = Question(source, tuple(arguments or ()), without)
    with only_results():
        result = screen_source(question, known or [], start=start, cost=cost)
    _write(outputs, result)


@report_errors()
def report(  # noqa: PLR0913 # the options of the command
    source: Source,
    candidates: Candidates = None,
    known: Known = None,
    html: Annotated[Path, typer.Option(metavar="PATH", help="The page to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option(help="The heading of the page.")] = "",
    arguments: Arguments = None,
    without: Without = None,
    json: Json = False,
    csv: Csv = None,
) -> None:
    """Write one HTML page: of the penalties that you name, else of a screen or a watch.

    SOURCE may also return a result: a fit, a screen, a watch or a validation.
    """
    from tacit.running import Question, result_of_source

    outputs = check_outputs(as_json=json, html=html, csv=csv)
    question = Question(source, tuple(arguments or ()), without)
    with only_results():
        result = result_of_source(question, candidates or [], known or [])
    _write(outputs, result, title=title)


def _write(outputs: Outputs, result: Any, by: str = "strength", title: str = "") -> None:
    """Print a result and write its files; it is printed also where a file cannot be written."""
    from tacit.reporting.result_page import write_report
    from tacit.running import describe, table

    try:
        if outputs.csv is not None:
            write_text(outputs.csv, table(result, by))
        if outputs.html is not None:
            with only_results():  # figures call the model again
                page = write_report(result, title=title)
            write_text(outputs.html, page)
    finally:
        print_result(outputs, *describe(result, by))
    for path in (outputs.csv, outputs.html):
        if path is not None and find_stream(path) is None:
            typer.echo(f"wrote {path}", err=True)


@report_errors()
def catalogue() -> None:
    """List all regularizers: formula, cost, error bars, and what each is mistaken for."""
    tacit.regularizers.catalogue()
