"""The repository keeps its own rules."""

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import tacit

ROOT = Path(__file__).parents[1]
FILES = [
    *ROOT.glob("src/**/*.py"), *ROOT.glob("tests/*.py"),
    *ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py"),
]  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 350


def test_public_names_exist_are_documented_and_sorted():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    assert tacit.__all__ == sorted(tacit.__all__)
    for name in tacit.__all__:
        assert getattr(tacit, name).__doc__, name
        assert re.search(rf"\b{name}\b", pages), f"{name} is in no page of the docs"


def test_importing_tacit_is_light():
    heavy = {"matplotlib", "pandas", "pyarrow", "scipy", "rich", "transformers", "safetensors"}
    code = f"import sys, tacit; print(sorted({heavy!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_constraints_pin_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + list(chain(*project["optional-dependencies"].values()))
    names = {re.split(r"[<>=!~\[]", requirement)[0] for requirement in wanted}
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )  # fmt: skip
    assert names == pins.keys()


def test_the_benchmarks_run_at_their_quick_sizes():
    found = subprocess.run(
        [sys.executable, "benchmarks/run.py", "--quick"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    for name in ("one plain gradient pass", "published protocol", "peak memory"):
        assert name in found.stdout
