"""Code blocks and commands of README and docs do what the page says."""

import io
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")


def blocks(page):
    return BLOCK.findall(page.read_text())


def assert_same_output(shown, printed):
    """Compare words exactly and numbers to three per cent. Numbers below 1e-9 count as equal."""

    def words(text):
        return NUMBER.sub("#", text).split()

    def numbers(text):
        return [float(n.replace(",", "")) for n in NUMBER.findall(text)]

    assert words(shown) == words(printed), f"page shows:\n{shown}\nbut it prints:\n{printed}"
    for a, b in zip(numbers(shown), numbers(printed), strict=True):
        assert a == pytest.approx(b, rel=0.03, abs=1e-9), f"{a} is shown, {b} printed:\n{printed}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    printed = ""
    for language, content in blocks(page):
        if language == "python":
            out = io.StringIO()
            with redirect_stdout(out):
                exec(compile(content, page.name, "exec"), names)
            printed = out.getvalue()
        elif language == "text":
            assert_same_output(content, printed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    files = re.findall(r"`((?:src|docs|examples|benchmarks|tests)/[\w./-]*)`", text)
    for link in links:
        assert (page.parent / link).exists(), link
    for file in files:
        assert (ROOT / file).exists(), file


def commands(page):
    """The commands of a page's console blocks, in order."""
    for language, content in blocks(page):
        if language in ("console", "bash", "sh"):
            for line in content.splitlines():
                if command := shlex.split(line, comments=True):
                    yield command


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if list(commands(p))], ids=lambda p: p.name)
def test_commands_run_at_their_quick_presets(page, reproduced):
    """Run each command in the folder of the reproduction, whose finished rows it reuses."""
    for command in commands(page):
        folder, arguments = reproduced, command
        if command[0] == "cd":  # cd FOLDER && …
            folder, arguments = ROOT / command[1], command[3:]
        if arguments[0] == "make":  # CI runs these; here each target must exist
            folder, program = ROOT, ["make", "--dry-run", *arguments[1:]]
        elif arguments[0] == "tacit":
            quick = ["quick" if word == "paper" else word for word in arguments[1:]]
            program = [sys.executable, "-m", "tacit", *quick]
        elif arguments[0] == ".venv/bin/pre-commit":  # it would change the clone's git hooks
            program = [sys.executable, "-m", "pre_commit", arguments[1], "--help"]
        else:
            assert arguments[0] == "python", f"{arguments[0]} is not tested"
            program = [sys.executable, *arguments[1:]]
        run = subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, f"{command}: {run.stdout}{run.stderr}"


@pytest.mark.slow
def test_the_example_recovers_both_strengths():
    run = subprocess.run(
        [sys.executable, "examples/elastic_net.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    errors = [float(error) for error in re.findall(r"relative error (\S+)\)", run.stdout)]
    assert len(errors) == 2
    assert max(errors) < 1e-3
    assert "No problems found" in run.stdout
