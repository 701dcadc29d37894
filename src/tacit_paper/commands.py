"""The commands `list`, `reproduce`, `plot` and `claims` of `tacit`.

Modules that need torch, pandas or matplotlib are imported inside the commands, so that
`tacit --help` stays fast.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tacit.cli import report_errors
from tacit.errors import InputError, check_choice
from tacit_paper import EXPERIMENTS, find_experiment, read_text

DATA_DIR_HELP = "Folder with the MNIST files. By default the user's cache, or a download into it."
UNITS_HELP = (
    "Only the units from A up to, not including, B of one figure. Without this option a later run "
    "joins them, draws the figure and writes the page."
)
INTERRUPTED = "interrupted: finished rows are kept; run the same command again to continue."


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to the app."""
    app.command("list")(list_experiments)
    app.command()(reproduce)
    app.command()(plot)
    app.command()(claims)


@report_errors()
def list_experiments() -> None:
    """List the paper's figures."""
    _require_packages()
    for name in EXPERIMENTS:
        typer.echo(f"{name:<24}{read_text(find_experiment(name)).title}")


@report_errors(INTERRUPTED)
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="Figures; all by default.")] = None,
    preset: Annotated[str, typer.Option(help="quick or paper.")] = "quick",
    out: Annotated[Path, typer.Option(help="Folder of rows, figures, page.")] = Path("results"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    force: Annotated[bool, typer.Option(help="Delete earlier rows and start again.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help=DATA_DIR_HELP)] = None,
    units: Annotated[str | None, typer.Option(help=UNITS_HELP, metavar="A:B")] = None,
) -> None:
    """Reproduce figures of the paper: rows, figures, and one page of all figures."""
    from tacit_paper import data

    _require_packages()
    with data.use_folder(data_dir):
        check_choice("preset", preset, ("quick", "paper"))
        experiments = list(dict.fromkeys(names or EXPERIMENTS))
        for name in experiments:
            find_experiment(name)
        chosen_device, note = choose_device(device)
        typer.echo(f"on {chosen_device}{note}")
        if units is not None:
            folder = out / preset / experiments[0]
            _reproduce_units(experiments, preset, folder, chosen_device, force, _parse_units(units))
            return
        for name in experiments:
            _reproduce_one(name, preset, out / preset / name, chosen_device, force)
        _write_page(out)


@report_errors()
def plot(
    folder: Annotated[Path, typer.Argument(help="A result folder, or a folder of several.")],
) -> None:
    """Draw figures again from their stored rows, and write the page again."""
    from tacit_paper import plots, store

    _require_packages()
    folders = list(store.finished_folders(folder)) if folder.is_dir() else []
    if not folders:
        raise InputError(f"{folder} contains no finished results: run tacit reproduce first.")
    for result_folder in folders:
        with store.locked(result_folder):
            names = [path.name for path in plots.draw(store.read_result(result_folder))]
        typer.echo(f"{result_folder}: {', '.join(names)}")
    _write_page(_page_folder(folder, folders))


@report_errors()
def claims(
    folder: Annotated[Path, typer.Argument(help="A folder of results.")] = Path("results"),
) -> None:
    """Print what the paper claims, with verdicts and the numbers of stored rows."""
    from tacit_paper import verdicts

    _require_packages()
    found = verdicts.gather(folder)
    for verdict in found:
        claim = verdict.claim
        typer.echo(f"{verdict.state:<20} {claim.statement} ({claim.place})")
        for line in filter(None, (verdict.number, verdict.caveat)):
            typer.echo(f"{'':<20}   {line}")
    typer.echo(verdicts.summarise(found))


def choose_device(name: str) -> tuple[str, str]:
    """The device to compute on, and a note for the user where it is not the one asked for."""
    import torch

    check_choice("device", name, ("auto", "cpu", "cuda", "mps"))
    available = ["cuda"] if torch.cuda.is_available() else []
    available += ["mps"] if torch.backends.mps.is_available() else []
    available += ["cpu"]
    name = available[0] if name == "auto" else name
    if name not in available:
        raise InputError(f"device {name!r} is not available here: use {' or '.join(available)}.")
    if name == "mps":
        return "cpu", " (mps lacks float64, in which everything is computed)"
    return name, ""


def _reproduce_one(name: str, preset: str, folder: Path, device: str, force: bool) -> None:
    """Compute the rows of one figure, draw it where anything is new, print its key numbers."""
    from tacit_paper import plots, store

    experiment = find_experiment(name)
    with store.locked(folder):
        with _progress_bar(name) as advance:
            result = store.run_experiment(
                name, experiment, preset, folder, device=device, force=force, advance=advance
            )
        if result.reused < len(result.rows) or not plots.are_drawn(result):
            plots.draw(result)
    with plots.report_other_rows(result):
        checks = experiment.check(result.rows)
    reused = f", {result.reused:,} of them reused" if result.reused else ""
    typer.echo(f"{typer.style(name, bold=True)}: {len(result.rows):,} rows{reused}")
    for check in checks:
        answer = typer.style(check.answer, fg="green" if check.holds else "red")
        typer.echo(f"  {answer} · {check.label}: {check.value:.4g} (expected {check.expected})")


def _reproduce_units(
    names: list[str], preset: str, folder: Path, device: str, force: bool, units: slice
) -> None:
    """Compute some units of one figure, beside other processes that compute others."""
    from tacit_paper import store

    if len(names) != 1 or force:
        given = "--force" if force else f"{len(names)} figures"
        raise InputError(
            f"--units was given with {given}: name one figure, such as tacit reproduce "
            "elastic-net --units 0:4, and delete its folder by hand to start again."
        )
    experiment = find_experiment(names[0])
    with _progress_bar(names[0]) as advance:
        done, total = store.run_units(
            names[0], experiment, preset, folder, units, device=device, advance=advance
        )
    last = units.start + done - 1
    typer.echo(
        f"{names[0]}: units {units.start} to {last} of 0 to {total - 1} are finished. "
        "Run the same command without --units for the figure."
    )


def _parse_units(text: str) -> slice:
    """The slice that `A:B` says; an end may be left out."""
    start, colon, stop = text.partition(":")
    try:
        units = slice(int(start or 0), int(stop) if stop else None)
    except ValueError:
        units = slice(-1, None)
    if not colon or units.start < 0 or (units.stop is not None and units.stop <= units.start):
        raise InputError(f"--units {text}: pass A:B with 0 <= A < B, such as 0:4.")
    return units


@contextmanager
def _progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with the time left, and a function to advance it; without rich, no bar."""
    from tacit.objective.passes import new_bar

    bar = new_bar()
    if bar is None:
        yield lambda done, total: None
    else:
        with bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _page_folder(folder: Path, results: list[Path]) -> Path:
    """Where the page of these results is: above `PRESET/NAME`, as `tacit reproduce` writes it.

    For results that lie in another way it is the folder that was given.
    """
    from tacit_paper import store

    homes = set()
    for path in (result.resolve() for result in results):
        metadata = store.read_metadata(path)
        named = (path.parent.name, path.name) == (metadata["preset"], metadata["experiment"])
        homes.add(path.parents[1] if named else folder.resolve())
    home = homes.pop()
    return home if not homes and home != folder.resolve() else folder


def _write_page(out: Path) -> None:
    from tacit_paper.page import write_page

    typer.echo(f"page: {write_page(out)}")


def _require_packages() -> None:
    """Refuse to start where an optional package that the figures need is not installed."""
    missing = [name for name in ("pandas", "pyarrow", "matplotlib") if find_spec(name) is None]
    if missing:
        raise InputError(f"figures need {', '.join(missing)}: pip install 'tacit[paper]'.")
