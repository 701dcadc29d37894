"""The command line: `tacit estimate`, the version, and what it needs to start."""

import csv
import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import tacit
from tacit import cli

MODULE = """
import asyncio, os, torch, tacit

def objective():
    torch.manual_seed(0)
    X, y = torch.randn(50, 4).double(), torch.randn(50, 1).double()
    model = torch.nn.Linear(4, 1, bias=False).double()
    gram = X.T @ X / 50 + 0.1 * torch.eye(4).double()
    model.weight.data = torch.linalg.solve(gram, X.T @ y / 50).T
    return tacit.Objective(model, torch.nn.functional.mse_loss, (X, y))

def number():
    return 3

def needs_data(data):
    return objective()

def module():
    return torch

def model():
    return torch.nn.Linear(2, 1)

model_itself = model()
builtin = dict

def fails():
    raise RuntimeError("no\\nGPU")

def leaves():
    raise SystemExit(3)

def cancels():
    raise asyncio.CancelledError

class Silent(Exception):
    def __str__(self):
        raise ValueError

def silent():
    raise Silent

def talkative():
    raise ValueError("x" * 10**6)

def fail(words):
    raise RuntimeError(words)

class Unsigned:
    __signature__ = property(lambda self: fail("unsigned"))
    def __call__(self):
        pass

class Classless:
    __class__ = property(lambda self: fail("no class"))

unsigned, no_class = Unsigned(), Classless

def moves():
    os.chdir("/")
    return objective()

class Moody(torch.nn.Linear):
    def forward(self, x):
        if len(x) > 40:
            raise RuntimeError("out of luck")
        return super().forward(x)

def moody():
    X = torch.randn(50, 4)
    return tacit.Objective(Moody(4, 1), torch.nn.functional.mse_loss, (X, X[:, :1]))
"""
RAISING = {
    "divides": "1 / 0",
    "leaves_at_import": "raise SystemExit('done')",
    "needs_a_package": "import no_such_package",
    "is_no_python": "def (",
    "nests": "def f(): return f()\nf()",
}
"""Modules that cannot be imported, by name."""


def invoke(*arguments):
    return CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the module `mine`, which can be imported."""
    (tmp_path / "mine.py").write_text(MODULE)
    for name, text in RAISING.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def test_estimate_prints_the_summary_or_json(folder):
    call = (
        "estimate", "mine:objective", "--with", "l2", "--with", "smooth_l1:beta=1e-3,name=lasso",
        "--known", "l2=0.04",
    )  # fmt: skip
    result = invoke(*call)
    assert result.exit_code == 0, result.output
    assert "explained 1.0000" in result.output
    fit = json.loads(invoke(*call, "--json").stdout)
    assert fit["strengths"] == pytest.approx({"l2": 0.06, "lasso": 0}, abs=1e-10)
    assert fit["sources"][0]["known"] == {"l2": 0.04}


@pytest.mark.parametrize(
    "spec",
    [
        *("l1", "group_l2:scope=weight", "layerwise:l2", "diagonal", "gradient_norm"),
        *("smooth_l1:scope=weight,w*,beta=1e-3", "layerwise:l2:scope=tacit.matrices"),
        *("schatten:p=1", "power:p=0.5,zero_width=1e-6", "layerwise:power:p=1.5", "orthogonality"),
        *("hypentropy:scale=0.1", "spectral_norm:equal_width=0.01,name=largest"),
    ],
)
def test_estimate_accepts_every_kind_of_candidate(folder, spec):
    result = invoke("estimate", "mine:objective", "--with", spec, "--nonnegative")
    assert result.exit_code == 0, result.output


def test_estimate_takes_the_semidefinite_constraint(folder):
    result = invoke("estimate", "mine:objective", "--with", "symmetric", "--psd")
    assert result.exit_code == 0, result.output
    assert "Λ ⪰ 0" in result.output


WRONG_OBJECTIVES = {
    "mine": "module:callable",
    "nowhere:x": "No module named 'nowhere'",
    "mine:nothing": "no callable 'nothing'",
    "mine:number": "return a tacit.Objective",
    "./mine.py:objective": "there is no file ./mine.py",
    "mine:needs_data": "(missing a required argument: 'data'): pass --arg name=value",
    "mine:module": "returned a module: return a tacit.Objective",
    "mine:model": "returned a Linear: return a tacit.Objective, as in",
    "mine:model_itself": "Name a function that returns a tacit.Objective",
    "mine:builtin": "'mine:builtin'",
    "mine:fails": "'mine:fails' raised RuntimeError: no GPU. Correct {folder}/mine.py, line",
    "mine:leaves": "'mine:leaves' raised SystemExit: 3. Correct {folder}/mine.py, line",
    "mine:cancels": "'mine:cancels' raised CancelledError. Correct {folder}/mine.py, line",
    "mine:silent": "'mine:silent' raised Silent. Correct {folder}/mine.py, line",
    "mine:talkative": "xxx. Correct {folder}/mine.py, line",
    "mine:unsigned": "raised RuntimeError: unsigned. Correct {folder}/mine.py, line",
    "mine:no_class": "raised RuntimeError: no class. Correct {folder}/mine.py, line",
    "mine:moody": "'mine:moody' raised RuntimeError: out of luck. Correct {folder}/mine.py, line",
    "divides:x": "raised ZeroDivisionError: division by zero. Correct {folder}/divides.py, line 1",
    "leaves_at_import:x": "raised SystemExit: done. Correct {folder}/leaves_at_import.py, line 1",
    "needs_a_package:x": "No module named 'no_such_package'. Correct {folder}/needs_a_package.py",
    "is_no_python:x": "(is_no_python.py, line 1). Correct {folder}/is_no_python.py, line 1.",
    "nests:x": "raised RecursionError",
    "mine\0:x": "Write module:callable",
}
WRONG_OPTIONS = {
    ("--csv", "."): "cannot be written",
    ("--html", "{file}/x"): "cannot be written",
    ("--html", "nowhere/x"): "there is no folder",
    ("--by", "row"): "--by is 'row': pass one of 'strength', 'layer'.",
    ("--with", "smooth_l1:beta=1,beta=2"): "option twice",
    ("--with", "l3"): "no regularizer 'l3'",
    ("--with", "smooth_l1"): "'smooth_l1' lacks an option: write smooth_l1:beta=….",
    ("--with", "smooth_l1:beta=x"): "beta is 'x'",
    ("--with", "smooth_l1:beta=-1"): "beta is -1.0",
    ("--with", "l2:width=3"): "write key=value with scope or name.",
    ("--with", "l2:beta=3"): "write key=value with scope or name.",
    ("--with", "l2:name=x,weight"): "write key=value with scope or name.",
    ("--with", "schatten:p=one"): "p is 'one' in 'schatten:p=one': pass a number.",
    ("--with", "schatten:p=-1"): "p is -1.0: pass a finite number, above 0",
    ("--with", "schatten:q=1"): "write key=value with p, scope, name or zero_width.",
    ("--with", "balance:pairs=a"): "write key=value with biases, scope or name.",
    ("--with", "balance:biases=yes"): "pass true or false.",
    ("--with", "balance"): "no two successive matrices fit",
    ("--with", "explicit_dropout:samples=1.5"): "pass a whole number.",
    ("--with", "distance_to"): "no regularizer 'distance_to'",
    ("--with", "regularizer:name=x"): "no regularizer 'regularizer'",
    ("--with", "layerwise:" * 1500 + "l2"): "write layerwise: once",
    ("--with", "layerwise:"): "write layerwise: once",
    ("--with", "layerwise"): "write layerwise: once",
    ("--with", "layerwise:gradient_norm"): "layerwise was given 'gradient_norm'",
    ("--with", "l" * 5000): "no regularizer 'lll",
    ("--with", "l2:" + "x" * 5000): "is not an option",
    ("--known", "schatten:p=1"): "is not an option",
    ("--with", "l2:scope=weight,bias"): "'bias' of the list matches no parameter",
    ("--with", "l2"): "several regularizers",
    ("--known", "l2"): "write it as l2=5e-5",
}
WRONG_CALLS = {(objective,): words for objective, words in WRONG_OBJECTIVES.items()}
WRONG_CALLS |= {("mine:objective", *options): words for options, words in WRONG_OPTIONS.items()}


@pytest.mark.parametrize("call", WRONG_CALLS, ids=lambda call: " ".join(call)[:60])
def test_a_wrong_call_is_one_line_and_exit_code_two(call, folder):
    (folder / "file").write_text("")
    arguments = [part.format(file=folder / "file") for part in (*call, "--with", "l2")]
    result = invoke("estimate", *arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert len(line) < 1000
    assert WRONG_CALLS[call].format(folder=folder) in line


def test_the_catalogue_is_printed():
    result = invoke("catalogue")
    assert result.exit_code == 0
    for words in ("schatten(p, zero_width)", "R = Σ_W Σ_k σ_k(W)^p", "cost: weights"):
        assert words in result.output


def test_code_that_changes_the_folder_does_not_move_the_files(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert invoke("estimate", "mine:moves", "--with", "l2", "--csv", "fit.csv").exit_code == 0
    assert (folder / "fit.csv").exists()


def test_an_error_of_tacit_itself_is_not_called_the_users(folder, monkeypatch):
    def estimate(*arguments, **options):
        raise RuntimeError("a defect")

    monkeypatch.setattr(tacit, "estimate", estimate)
    code = estimate.__code__.replace(co_filename=cli.__file__)
    monkeypatch.setattr(estimate, "__code__", code)
    result = invoke("estimate", "mine:objective", "--with", "l2")
    assert isinstance(result.exception, RuntimeError)


def test_the_summary_is_not_lost_where_the_file_cannot_be_written(folder):
    result = invoke("estimate", "mine:objective", "--with", "l2", "--csv", "/dev/full")
    assert result.exit_code == 2
    assert "explained 1.0000" in result.stdout
    (line,) = result.stderr.splitlines()
    assert "cannot be written to (No space left on device)" in line


WRITE = """
import typer
from pathlib import Path
from tacit.cli import report_errors
from tacit.outputs import write_text

@report_errors()
def main():
    write_text(Path("{path}"), "a,b\\n")
    print("and more: ∇")

typer.run(main)
"""


def shell(folder, path, redirection=""):
    """Write CSV to the path and then a line, in a process with this redirection."""
    command = [sys.executable, "-c", WRITE.format(path=path)]
    return subprocess.run(
        f"{shlex.join(command)} {redirection}",
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_a_file_that_is_the_output_does_not_replace_or_overwrite_it(tmp_path):
    before = Path("/dev/stdout").readlink()
    expected = "a,b\nand more: ∇\n"
    assert shell(tmp_path, "/dev/stdout").stdout == expected
    assert shell(tmp_path, "/dev/stdout", "> file").stderr == ""
    assert (tmp_path / "file").read_text() == expected
    assert shell(tmp_path, "/dev/stderr", "2>> file").stdout == "and more: ∇\n"
    assert (tmp_path / "file").read_text() == expected + "a,b\n"
    assert Path("/dev/stdout").readlink() == before


def test_an_output_that_is_closed_or_has_few_characters_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert shell(tmp_path, "fit.csv").stdout == "and more: \\u2207\n"
    closed = shell(tmp_path, "fit.csv", ">&-")
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_full_disk_behind_the_output_is_one_line(tmp_path):
    for path, redirection in (("fit.csv", "> /dev/full"), ("/dev/full", "")):
        (line,) = shell(tmp_path, path, redirection).stderr.splitlines()
        assert line.startswith("error: ")
        assert "No space left on device" in line
    assert (tmp_path / "fit.csv").read_text() == "a,b\n"


@pytest.mark.parametrize("path", ["/dev/stdout", "-"])
def test_csv_can_be_piped_because_the_summary_goes_to_the_errors(path, folder, capfd):
    arguments = ["estimate", "mine:objective", "--with", "l2", "--csv", path]
    cli.build_app()(arguments, standalone_mode=False)
    output, errors = capfd.readouterr()
    (row,) = csv.DictReader(output.splitlines())
    assert float(row["strength"]) == pytest.approx(0.1, rel=1e-9)
    assert "explained 1.0000" in errors


def test_an_interrupted_estimate_exits_with_130(folder):
    (folder / "mine.py").write_text("def objective(): raise KeyboardInterrupt")
    result = invoke("estimate", "mine:objective", "--with", "l2")
    assert result.exit_code == 130
    assert result.stderr == "interrupted.\n"


def test_installed_packages_add_commands_by_entry_points(monkeypatch):
    def add_commands(app):
        app.command("greet")(lambda: print("hello"))

    def entry_points(*, group):
        assert group == "tacit.commands"
        return [SimpleNamespace(load=lambda: add_commands)]

    monkeypatch.setattr(cli, "entry_points", entry_points)
    for app in (cli.build_app(), cli.build_app([add_commands])):
        assert [command.name for command in app.registered_commands] == [*[None] * 4, "greet"]
        assert CliRunner().invoke(app, ["greet"]).output == "hello\n"


def run_tacit(*arguments, before="", module="tacit"):
    """Run the command in a new process, which executes `before` first."""
    code = (
        f"import runpy, sys\n{before}\nsys.argv = ['tacit', *{list(arguments)!r}]\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "finally: print(sorted({'torch', 'pandas', 'matplotlib', 'scipy'} & set(sys.modules)))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_no_heavy_package(option):
    process = run_tacit(option)
    assert process.returncode == 0, process.stderr
    *text, imported = process.stdout.splitlines()
    assert imported == "[]"
    if option == "--version":
        assert text == [f"tacit {tacit.__version__}"]
    else:
        for command in (
            "estimate",
            "screen",
            "report",
            "catalogue",
            "list",
            "reproduce",
            "plot",
            "claims",
        ):
            assert any(line.split()[:1] == [command] for line in text)


BLOCK = "sys.modules.update(dict.fromkeys({names!r}))"


def test_without_typer_one_line_says_what_to_install():
    process = run_tacit("--help", before=BLOCK.format(names=["typer", "rich"]))
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert "pip install 'tacit[cli]'" in line


def test_without_rich_the_command_runs_without_a_progress_bar(tmp_path, monkeypatch):
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    result = invoke("reproduce", "tradeoff", "--out", tmp_path, "--device", "cpu")
    assert (result.exit_code, result.stderr) == (0, "")
    assert (tmp_path / "quick" / "tradeoff" / "figure.svg").exists()


def test_a_saved_target_is_estimated_without_its_objective(folder, monkeypatch):
    monkeypatch.chdir(folder)
    objective = importlib.import_module("mine").objective()
    tacit.endpoint_target(objective).save("target.safetensors")
    result = CliRunner().invoke(
        cli.build_app(), ["estimate", "target.safetensors", "--with", "l2", "--known", "l1=0.01"]
    )
    assert result.exit_code == 0, result.output
    known = {tacit.l1(): 0.01}
    assert (
        result.output.strip()
        == tacit.estimate(
            tacit.Target.load("target.safetensors"), [tacit.l2()], known=known
        ).summary()
    )
    for arguments, words in (
        (["target.safetensors", "--with", "gradient_norm"], "depends on data"),
        (["target.safetensors", "--with", "l2", "--population", "inf"], "needs the objective"),
        (["other.safetensors", "--with", "l2"], "holds no target"),
    ):
        result = CliRunner().invoke(cli.build_app(), ["estimate", *arguments])
        assert result.exit_code == 2
        assert words in result.output
