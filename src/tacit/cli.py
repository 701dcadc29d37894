"""The command line: reproduce figures, draw them again, estimate for your own objective."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tacit.errors import InputError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Estimate the regularization that a training run applied without writing it down.",
)
screen = Console(highlight=False, soft_wrap=True)
PRESETS = ("quick", "paper")


@contextmanager
def plain_errors() -> Iterator[None]:
    """A wrong call ends in one line and exit code 2; an interruption in 130."""
    try:
        yield
    except InputError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"error: {' '.join(str(error).split())}", markup=False
        )
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        Console(stderr=True, highlight=False).print(
            "interrupted: finished rows are kept; the same command goes on from there."
        )
        raise typer.Exit(130) from None


@app.command("list")
def list_experiments() -> None:
    """List the experiments."""
    from tacit_paper import MODULES, load

    with plain_errors():
        _need("pandas", "pyarrow", "matplotlib")
        for name in MODULES:
            screen.print(f"{name:<24}{load(name).TITLE}")


@app.command()
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="Experiments; all by default.")] = None,
    preset: Annotated[str, typer.Option(help="quick or paper.")] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for rows, figures and the page.")] = Path(
        "results"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    force: Annotated[bool, typer.Option(help="Forget earlier rows and start anew.")] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the MNIST files; without it the user's cache, or a download."
        ),
    ] = None,
) -> None:
    """Reproduce figures of the paper: rows, figures and a page of all."""
    from tacit_paper import MODULES, data, load

    with plain_errors(), data.directory(data_dir):
        _need("pandas", "pyarrow", "matplotlib")
        if preset not in PRESETS:
            raise InputError(f"no preset {preset!r}: there are {', '.join(PRESETS)}.")
        chosen = list(dict.fromkeys(names or MODULES))
        for name in chosen:
            load(name)
        place, note = choose_device(device)
        screen.print(f"on {place}" + (f" ({note})" if note else ""))
        for name in chosen:
            _reproduce_one(name, preset, out / preset / name, place, force)
        _write_page(out)


def _reproduce_one(name: str, preset: str, folder: Path, device: str, force: bool) -> None:
    from tacit_paper import load, plots, store

    experiment = load(name)
    with _progress(name) as advance:
        result = store.execute(
            name, experiment, preset, folder, device=device, force=force, advance=advance
        )
    reused = f", {result.reused:,} of them reused" if result.reused else ""
    screen.print(f"[bold]{name}[/bold]: {len(result.rows):,} rows{reused}")
    plots.save(experiment.plot(result.rows), folder)
    for check in experiment.check(result.rows):
        mark = "[green]yes[/green]" if check.holds else "[red]no[/red]"
        screen.print(f"  {mark:<4} {check.label}: {check.value:.4g} (expected {check.expected})")


@app.command()
def plot(
    folder: Annotated[Path, typer.Argument(help="A result folder, or one that holds several.")],
) -> None:
    """Draw figures again from their rows, and the page where there is one."""
    from tacit_paper import load, plots, store

    with plain_errors():
        _need("pandas", "pyarrow", "matplotlib")
        found = list(store.results(folder)) if folder.is_dir() else []
        if not found:
            raise InputError(f"{folder} holds no finished results: run tacit reproduce first.")
        for one in found:
            result = store.read(one)
            with store.of_this_version(one):
                figure = load(result.head["experiment"]).plot(result.rows)
            written = plots.save(figure, one)
            screen.print(f"{one}: {', '.join(path.name for path in written)}")
        if (folder / "index.html").exists():
            _write_page(folder)


@app.command()
def estimate(
    objective: Annotated[str, typer.Argument(help="module:callable that returns an Objective.")],
    candidates: Annotated[
        list[str], typer.Option("--with", help="l2, smooth_l1:beta=1e-3, layerwise:l2, …")
    ],
    known: Annotated[
        list[str] | None, typer.Option(help="A penalty that was applied, as l2=5e-5.")
    ] = None,
    nonnegative: Annotated[bool, typer.Option(help="Strengths at least zero.")] = False,
    population: Annotated[
        float | None,
        typer.Option(
            help="Examples that the data was drawn from (inf for no end): adds sampling errors."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the fit there.")] = None,
) -> None:
    """Estimate strengths at the objective's parameters and print the summary."""
    import tacit
    from tacit.specs import find_objective, parse_known, parse_regularizer
    from tacit.uncertainty.scores import with_sampling

    with plain_errors():
        found = find_objective(objective)
        regularizers = [parse_regularizer(spec, found) for spec in candidates]
        applied = dict(parse_known(spec, found) for spec in known or [])
        equations = tacit.endpoint_equations(found, regularizers, known=applied)
        result = tacit.fit(equations, nonnegative=nonnegative)
        result = with_sampling(result, found, regularizers, known=applied, population=population)
        if json_file is not None:
            _write(json_file, json.dumps(result.to_dict(), indent=2) + "\n")
    print(result.summary())


def choose_device(name: str) -> tuple[str, str]:
    """The device to run on, and what a user should know about it."""
    import torch

    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, available in there.items() if available)
    elif name not in there:
        raise InputError(f"no device {name!r}: there are auto, {', '.join(sorted(there))}.")
    elif not there[name]:
        have = ", ".join(kind for kind, available in there.items() if available)
        raise InputError(f"device {name!r} is not available here: there is {have}.")
    if name == "mps":
        return "cpu", "mps has no float64, which all of this is computed in"
    return name, ""


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with the time left, on terminals."""
    from tacit.objective.passes import new_bar

    bar = new_bar()
    try:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        bar.stop()


def _write_page(out: Path) -> None:
    from tacit_paper.page import write_page

    screen.print(f"page: {write_page(out)}")


def _write(path: Path, text: str) -> None:
    try:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text)
        partial.replace(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be written ({error}). Choose another file.") from error


def _need(*packages: str) -> None:
    from importlib.util import find_spec

    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise InputError(
            f"experiments need {', '.join(missing)}: pip install 'tacit[experiments]'."
        )


def main() -> Any:
    """Entry point of the `tacit` command."""
    sys.path.insert(0, str(Path.cwd()))
    return app()
