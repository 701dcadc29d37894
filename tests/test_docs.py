"""Code blocks of README and docs print what the page shows, and the files that it names exist."""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from support.pages import PAGES, ROOT, code_blocks, name_of
from typer.testing import CliRunner

from tacit.cli import build_app

NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")


def assert_same_output(shown, printed):
    """Compare words exactly and numbers to three per cent. Numbers below 1e-9 count as equal."""

    def words(text):
        return NUMBER.sub("#", text).split()

    def numbers(text):
        return [float(n.replace(",", "")) for n in NUMBER.findall(text)]

    assert words(shown) == words(printed), f"page shows:\n{shown}\nbut it prints:\n{printed}"
    for a, b in zip(numbers(shown), numbers(printed), strict=True):
        assert a == pytest.approx(b, rel=0.03, abs=1e-9), f"{a} is shown, {b} printed:\n{printed}"


EXECUTED = [
    page for page in PAGES if any(language == "python" for language, _ in code_blocks(page))
]


@pytest.mark.slow
# Lightning advises more workers, and uses what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:The `srun` command:UserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
def test_python_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "docs"}
    printed = ""
    for language, content in code_blocks(page):
        if language == "python":
            out = io.StringIO()
            with redirect_stdout(out):
                exec(compile(content, page.name, "exec"), names)
            printed = out.getvalue()
        elif language == "text":
            assert_same_output(content, printed)


def test_how_tos_end_with_an_answer_and_say_when_not_to_believe_it():
    pages = {page.stem: page.read_text() for page in PAGES if page.parent.name == "how-to"}
    contents = pages.pop("index")
    for name, text in pages.items():
        assert f"]({name}.md)" in contents, f"{name} is not in the table of docs/how-to/index.md"
        assert f"\n{name}\n" in contents, f"{name} is not in the toctree of docs/how-to/index.md"
        assert "```text\n" in text, f"{name} shows no answer"
        assert "\n## When not to believe it\n" in text, name


def test_the_quickstart_is_short():
    """From `pip install .` to an answer on a model of one's own."""
    blocks = code_blocks(ROOT / "docs" / "quickstart.md")
    lines = [
        line
        for language, content in blocks
        if language == "console" or ("tacit.settle" in content and language == "python")
        for line in content.splitlines()
        if line.strip()
    ]
    assert lines[0] == "pip install ."
    assert len(lines) <= 12


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    files = re.findall(r"`((?:src|docs|examples|benchmarks|tests)/[\w./-]*)`", text)
    for link in links:
        assert (page.parent / link).exists(), link
    for file in files:
        assert (ROOT / file).exists(), file


@pytest.mark.slow
def test_the_commands_on_the_page_of_the_command_line_print_what_is_shown(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "examples"), *sys.path])
    page, printed, count = ROOT / "docs" / "command-line.md", "", 0
    for language, content in code_blocks(page):
        if language == "text":
            assert_same_output(content, printed)
        for line in content.splitlines() if language == "console" else ():
            folder, *command = shlex.split(line.removeprefix("cd "))
            assert (folder, command[:2]) == ("examples", ["&&", "tacit"])
            result = CliRunner().invoke(build_app(), command[2:])
            assert result.exit_code == 0, result.output
            printed, count = result.stdout, count + 1
    assert count == 6
    written = {path.name for path in Path().iterdir() if path.suffix in (".html", ".csv")}
    assert written == {"report.html", "screen.html", "candidates.csv"}
    assert "<h1>A small network</h1>" in Path("report.html").read_text()


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


@pytest.mark.slow
def test_the_language_model_shows_the_decay_of_adamw():
    command = [sys.executable, "examples/language_model.py", "--seed", "0"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    explained = {
        name.strip(): float(percent)
        for name, percent in re.findall(r"^(\S.*?) +([\d.]+)%  ", run.stdout, re.MULTILINE)
    }
    assert list(explained) == [
        "AdamW's metric ridge", "ridge", "ridge by layer", "distance to initial"
    ]  # fmt: skip
    best, *others = explained.values()
    assert best > 95
    assert max(others) < 60
    row = r"metric ridge .*% +([\d.]+) \[([\d.]+), ([\d.]+)\] +([\d.]+) +none"
    ((strength, low, high, applied),) = (map(float, r) for r in re.findall(row, run.stdout))
    assert low < strength < high
    # The text is that of this version of Python, so that one interval may miss by a little.
    assert strength == pytest.approx(applied, rel=0.01)


@pytest.mark.slow
def test_two_processes_recover_the_decay_as_the_page_shows():
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        "examples/sharded.py",
    ]
    only_here = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | only_here, timeout=300
    )
    assert run.returncode == 0, run.stderr
    ((applied, recovered),) = re.findall(r"applied (\S+), recovered (\S+),", run.stdout)
    assert float(recovered) == pytest.approx(float(applied), rel=0.01)
    blocks = dict(code_blocks(ROOT / "docs" / "how-to" / "sharded.md"))
    assert_same_output(blocks["text"], run.stdout)


def test_the_page_of_a_sharded_model_shows_the_example():
    blocks = dict(code_blocks(ROOT / "docs" / "how-to" / "sharded.md"))
    example = (ROOT / "examples" / "sharded.py").read_text()
    assert textwrap.indent(blocks["py"], "    ") in example
