"""The repository keeps its conventions."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest

import tacit

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("src/**/*.py"))
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs")

LONG_FILES = {
    "src/tacit/fitting/problems.py": "one table, which a reader wants to see as a whole",
}
"""Files of more than 500 lines, each with the reason why they are one concept."""

IMPORTED_WHERE_USED = {
    *("matplotlib", "pandas", "pyarrow", "rich", "sklearn", "typer"),  # optional
    *("safetensors", "scipy"),  # slow to import
}
COMMAND_FILES = {
    *("src/tacit/__main__.py", "src/tacit/cli.py"),
    *("src/tacit_paper/__init__.py", "src/tacit_paper/commands.py"),
}
"""These may import torch and tacit inside functions, so that `tacit --help` does not wait."""


def run_python(code):
    """What the code prints, in a new process."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_files_past_500_lines_are_listed_with_a_reason():
    files = chain(*(ROOT.glob(f"{folder}/**/*.py") for folder in FOLDERS))
    long = {
        str(path.relative_to(ROOT)) for path in files if len(path.read_text().splitlines()) > 500
    }
    assert long == LONG_FILES.keys()


def test_public_names_exist_and_are_sorted():
    """`tests/test_public_names.py` asks for their docstrings, entries and examples."""
    assert tacit.__all__ == sorted(tacit.__all__)
    for name in tacit.__all__:
        assert getattr(tacit, name).__doc__, name


def test_the_public_surface_stays_small():
    names = [n for n in tacit.__all__ if not isinstance(getattr(tacit, n), ModuleType)]
    assert len(names) <= 40


def test_the_names_that_type_checkers_see_are_listed_and_imported_when_used():
    stub = ast.parse((ROOT / "src/tacit/__init__.pyi").read_text())
    seen = [
        alias.asname for node in stub.body if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]  # fmt: skip
    assert sorted(seen) == tacit.__all__
    code = "import sys, tacit; print(*dir(tacit)); print('torch' in sys.modules)"
    names, torch_is_imported = run_python(code).splitlines()
    assert set(seen) < set(names.split())
    assert torch_is_imported == "False"


def packages():
    """Both packages and all packages inside them."""
    for name in ("tacit", "tacit_paper"):
        package = importlib.import_module(name)
        yield package
        for entry in pkgutil.walk_packages(package.__path__, f"{name}."):
            if entry.ispkg:
                yield importlib.import_module(entry.name)


def test_no_exported_name_hides_a_module():
    hidden = [
        f"{package.__name__}.{entry.name}"
        for package in packages()
        for entry in pkgutil.iter_modules(package.__path__)
        if not isinstance(getattr(package, entry.name, package), ModuleType)
    ]
    assert hidden == []


def imports_inside_functions(tree):
    """Line and package of every import in the body of a function."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom):
                    yield node.lineno, (node.module or "").split(".")[0]
                elif isinstance(node, ast.Import):
                    yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)


def test_only_optional_and_slow_packages_are_imported_inside_functions():
    violations = []
    for path in SOURCES:
        file, allowed = str(path.relative_to(ROOT)), IMPORTED_WHERE_USED
        if file in COMMAND_FILES:
            allowed = allowed | {"tacit", "tacit_paper", "torch"}
        imports = imports_inside_functions(ast.parse(path.read_text()))
        violations += [f"{file}:{line} {name}" for line, name in imports if name not in allowed]
    assert violations == []


def test_importing_every_public_name_is_light():
    heavy = {*IMPORTED_WHERE_USED, "transformers"}
    light = [name for name in tacit.__all__ if name != "reference"]  # the oracle uses scipy
    code = (
        f"import sys, tacit; [getattr(tacit, name) for name in {light!r}];"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    assert run_python(code).strip() == "[]"


def test_the_constraints_pin_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + list(chain(*project["optional-dependencies"].values()))
    names = {re.split(r"[<>=!~\[]", requirement)[0] for requirement in wanted}
    names -= {"tacit"}  # extras that include others
    sections = (ROOT / "constraints.txt").read_text().split("# What the site's packages need")
    pins, indirect = (set(re.findall(r"^(\S+)==\S+$", text, re.MULTILINE)) for text in sections)
    assert names == pins
    needed = chain(*(metadata.requires(name) or [] for name in ("furo", "myst-parser", "sphinx")))
    assert indirect <= {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in needed}


def test_the_citation_names_this_version():
    assert f"version: {tacit.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.slow
def test_the_benchmarks_run_at_their_quick_sizes():
    run = subprocess.run(
        [sys.executable, "benchmarks/run.py", "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    for name in ("one plain gradient pass", "published protocol", "peak memory"):
        assert name in run.stdout
