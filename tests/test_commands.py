"""`tacit estimate`, `screen` and `report` as a user runs them: sources, options and files."""

import csv
import io
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import tacit
from tacit import cli

MODULE = """
from __future__ import annotations
from pathlib import Path
from typing import Literal, Optional
import torch, tacit
from neighbour import LAYERS

F = torch.nn.functional
def network(width: int = 3, seed: int = 0):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(width, width).double() for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers)

def data(width: int = 3):
    generator = torch.Generator().manual_seed(7)
    X = torch.randn(40, width, generator=generator, dtype=torch.float64)
    return X, X.flip(1)

def ridge(strength: float = 0.1, rows: int = 50, path: Path = Path("none"), scaled: bool = False):
    assert isinstance(path, Path) and isinstance(scaled, bool) and isinstance(rows, int)
    print("training …")
    torch.manual_seed(0)
    X, y = torch.randn(rows, 4).double(), torch.randn(rows, 1).double()
    model = torch.nn.Linear(4, 1, bias=False).double()
    gram = X.T @ X / rows + strength * torch.eye(4).double()
    model.weight.data = torch.linalg.solve(gram, X.T @ y / rows).T
    return tacit.Objective(model, F.mse_loss, (X, y))

def literal(
    kind: Literal["a", "b"] = "a", maybe: Optional[int] = None, text="", union: int | None = 1
):
    print(repr((kind, maybe, text, union)))
    return ridge()

def anything(**options):
    print(sorted(options.items()))
    return ridge()

MODEL = network()
def noisy():
    plain = tacit.Objective(MODEL, F.mse_loss, data())
    return tacit.techniques.weight_noise(plain, 0.01, draws=32), plain

def technique():
    return noisy()[0]

def plain():
    return noisy()[1]

def pair_of_others():
    return ridge(), 3

def equations():
    return tacit.endpoint_equations(plain(), [tacit.l2(), tacit.l1()])

def target():
    return tacit.endpoint_target(plain())

def fit():
    return tacit.estimate(ridge(), [tacit.l2()])

def validation():
    return tacit.validate(fit())

def watch(epochs: int = 40):
    model = network()
    X, y = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.02)
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    watch = tacit.watch(model, optimizer, objective, [tacit.l2()], every=10, budget=None)
    for _ in range(epochs):
        for rows in torch.randperm(40).split(10):
            optimizer.zero_grad()
            F.mse_loss(model(X[rows]), y[rows]).backward()
            optimizer.step()
        watch.end_epoch()
    return watch
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a project: the file `project.py`, and a neighbour that it imports."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "project.py").write_text(MODULE)
    (folder / "neighbour.py").write_text("LAYERS = 12")
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    """Run a command in the folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def invoke(*arguments):
        return CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])

    yield invoke
    for name in ("project", "neighbour"):
        sys.modules.pop(name, None)


def test_what_the_users_code_prints_goes_to_the_errors(run, folder, monkeypatch):
    text = """
import torch, tacit
print("on import")
def loss(output, target):
    print("in the loss")
    return torch.nn.functional.mse_loss(output, target)
def objective():
    print("in the call")
    X = torch.eye(3).double()
    return tacit.Objective(torch.nn.Linear(3, 3).double(), loss, (X, X))
"""
    (folder / "prints.py").write_text(text)
    for command in (["estimate", "--with", "l2"], ["screen"], ["report", "--with", "l2"]):
        monkeypatch.delitem(sys.modules, "prints", raising=False)
        result = run(*command, "prints.py:objective", "--json", "--html", "page.html")
        assert json.loads(result.stdout)
        for place in ("on import", "in the call", "in the loss"):
            assert place in result.stderr


def fit_of(result):
    """The fit in JSON on the output, on which nothing else is."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def the_error(result):
    """The one line on the errors of a wrong call."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = [line for line in result.stderr.splitlines() if line != "training …"]
    assert len(line) == 1
    assert line[0].startswith("error: ")
    return line[0]


def test_a_file_with_neighbours_is_run_and_its_arguments_are_converted(run):
    arguments = ["rows=30", "strength=2e-1", "path=a=b.pt", "scaled=True"]
    passed = [word for argument in arguments for word in ("--arg", argument)]
    result = run("estimate", "project.py:ridge", *passed, "--with", "l2", "--json")
    fit = fit_of(result)
    assert fit["strengths"] == pytest.approx({"l2": 0.2}, rel=1e-9)
    assert fit["sources"][0]["examples"] == 30
    assert "training …" in result.stderr


@pytest.mark.parametrize(
    ("function", "arguments", "seen"),
    [
        ("literal", ["kind=b", "maybe=3", "text=1", "union=4"], "('b', 3, '1', 4)"),
        ("literal", [], "('a', None, '', 1)"),
        ("anything", ["b=1", "a=true"], "[('a', 'true'), ('b', '1')]"),
    ],
)
def test_arguments_have_the_types_of_annotations(run, function, arguments, seen):
    passed = [word for argument in arguments for word in ("--arg", argument)]
    result = run("estimate", f"project.py:{function}", *passed, "--with", "l2")
    assert result.exit_code == 0, result.output
    assert seen in result.stderr


def test_a_callable_may_be_an_attribute_of_an_attribute(run, folder):
    (folder / "classes.py").write_text(
        "import project\nclass Models:\n    ridge = staticmethod(project.ridge)\n"
    )
    fit = fit_of(run("estimate", "classes.py:Models.ridge", "--with", "l2", "--json"))
    assert fit["strengths"] == pytest.approx({"l2": 0.1})
    assert "no callable 'Models.lasso'" in the_error(
        run("estimate", "classes.py:Models.lasso", "--with", "l2")
    )


def test_a_file_does_not_replace_a_module_of_its_name(run, folder):
    (folder / "named").mkdir()
    (folder / "named" / "json.py").write_text(MODULE.replace("neighbour", "near"))
    (folder / "named" / "near.py").write_text("LAYERS = 2")
    result = run("estimate", "named/json.py:ridge", "--with", "l2", "--json")
    assert fit_of(result)["strengths"] == pytest.approx({"l2": 0.1})
    assert sys.modules["json"] is json


def test_a_technique_is_estimated_from_two_objectives_or_without(run):
    pair = fit_of(run("estimate", "project.py:noisy", "--with", "hessian_trace", "--json"))
    assert pair["sources"][0]["mode"] == "difference"
    technique, plain = sys.modules["project"].noisy()
    traces = tacit.regularizers.hessian_trace(plain)
    expected = tacit.fit(tacit.difference_equations(technique, plain, traces)).strengths
    assert pair["strengths"] == pytest.approx(expected, rel=1e-9)
    without = run(
        "estimate", "project.py:technique", "--without", "project.py:plain",
        "--with", "hessian_trace", "--json",
    )  # fmt: skip
    assert fit_of(without)["strengths"] == pair["strengths"]


def test_arguments_go_to_the_callable_that_has_them(run, folder):
    (folder / "two.py").write_text(
        "from project import *\n"
        "def technique(size: float):\n"
        "    return tacit.techniques.weight_noise(plain(), size, draws=32)\n"
    )
    call = ("estimate", "two.py:technique", "--without", "two.py:plain", "--with", "hessian_trace")
    fit = fit_of(run(*call, "--arg", "size=0.01", "--json"))
    pair = fit_of(run("estimate", "two.py:noisy", "--with", "hessian_trace", "--json"))
    assert fit["strengths"] == pair["strengths"]
    assert "takes no --arg 'width': its parameters are size." in the_error(
        run(*call, "--arg", "width=3")
    )


def test_stored_targets_and_equations_are_sources(run, folder):
    objective_fit = fit_of(
        run("estimate", "project.py:plain", "--with", "l2", "--with", "l1", "--json")
    )
    for name in ("equations", "target"):
        saver = f"from project import *; {name}().save('{name}.safetensors')"
        assert subprocess.run([sys.executable, "-c", saver], cwd=folder).returncode == 0
    stored = fit_of(run("estimate", "equations.safetensors", "--json"))
    again = fit_of(run("estimate", "target.safetensors", "--with", "l2", "--with", "l1", "--json"))
    from_call = fit_of(run("estimate", "project.py:equations", "--json"))
    for fit in (stored, again, from_call):
        assert fit["strengths"] == pytest.approx(objective_fit["strengths"], rel=1e-9)
    bounded = fit_of(run("estimate", "equations.safetensors", "--nonnegative", "--json"))
    assert min(bounded["strengths"].values()) >= 0
    for source in (["equations.safetensors"], ["target.safetensors", "--cost", "weights"]):
        screen = fit_of(run("screen", *source, "--json"))
        assert screen["clusters"] == {"kind": "layers", "count": 12}
    assert "--with cannot be passed with equations" in the_error(
        run("estimate", "equations.safetensors", "--with", "l2")
    )
    assert "is a file, which takes no --arg" in the_error(
        run("estimate", "target.safetensors", "--with", "l2", "--arg", "a=1")
    )


def test_layers_are_printed_and_written(run, folder):
    call = ("estimate", "project.py:plain", "--with", "l2", "--by", "layer")
    result = run(*call, "--csv", "layers.csv")
    assert result.exit_code == 0, result.output
    assert "12 layers, each fitted by itself" in result.stdout
    assert result.stderr == f"wrote {folder / 'layers.csv'}\n"
    rows = list(csv.DictReader(io.StringIO((folder / "layers.csv").read_text())))
    assert [row["layer"] for row in rows] == [str(number) for number in range(12)]
    shown = fit_of(run(*call, "--json"))["layers"]
    assert [float(row["strength"]) for row in rows] == [row["strength"] for row in shown]


def test_csv_has_the_columns_and_numbers_of_the_frame(run, folder):
    call = ("estimate", "project.py:plain", "--with", "l2", "--with", "l1", "--population", "inf")
    assert run(*call, "--csv", "fit.csv").exit_code == 0
    pandas = pytest.importorskip("pandas")
    written = pandas.read_csv(folder / "fit.csv")
    sys.path.insert(0, str(folder))
    objective = __import__("project").plain()
    fit = tacit.estimate(objective, [tacit.l2(), tacit.l1()], population=float("inf"))
    pandas.testing.assert_frame_equal(written, fit.to_frame())


def test_a_screen_is_printed_and_written(run, folder):
    torch.manual_seed(1)
    torch.save({f"{n}.{k}": torch.randn(3, 3) if k == "weight" else torch.randn(3)
                for n in range(12) for k in ("weight", "bias")}, folder / "start.pt")  # fmt: skip
    call = ("screen", "project.py:plain", "--cost", "weights", "--start", "start.pt")
    result = run(*call, "--csv", "screen.csv", "--html", "screen.html")
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO((folder / "screen.csv").read_text())))
    assert "distance_to" in "".join(row["name"] for row in rows)
    assert "What regularization is in the model?" in (folder / "screen.html").read_text()
    assert fit_of(run(*call, "--json"))["verdict"] in result.stdout + "nothing ranked answer"


@pytest.mark.parametrize(
    ("source", "options", "heading"),
    [
        ("plain", ["--with", "l2"], "Estimated regularization"),
        ("plain", [], "Screen for regularization"),
        ("noisy", ["--with", "hessian_trace"], "Estimated regularization"),
        ("equations", [], "Estimated regularization"),
        ("fit", [], "Estimated regularization"),
        ("watch", [], "Regularization along training"),
        ("validation", [], "Validation of the estimated penalty"),
    ],
)
def test_reports_are_of_whatever_the_source_is(run, folder, source, options, heading):
    (folder / "report.html").unlink(missing_ok=True)
    result = run("report", f"project.py:{source}", *options, "--csv", "report.csv")
    assert result.exit_code == 0, result.output
    assert f"<h1>{heading}</h1>" in (folder / "report.html").read_text()
    assert len(list(csv.DictReader(io.StringIO((folder / "report.csv").read_text())))) >= 1
    assert f"wrote {folder / 'report.html'}" in result.stderr
    assert json.loads(run("report", f"project.py:{source}", *options, "--json").stdout)


def test_a_watch_is_estimated_and_screened(run):
    known = fit_of(run("estimate", "project.py:watch", "--json"))
    assert known["strengths"]["l2"] == pytest.approx(0.01, rel=0.3)
    both = run("estimate", "project.py:watch", "--with", "l2", "--with", "l1", "--json")
    assert list(fit_of(both)["strengths"]) == ["l2", "l1"]
    assert fit_of(run("screen", "project.py:watch", "--cost", "weights", "--json"))["table"]


WRONG = {
    ("estimate", "project.py:ridge"): "--with is missing",
    ("estimate", "project.py"): "write it as module:callable, or as path/file.py:callable",
    ("estimate", "nowhere.py:ridge", "--with", "l2"): "there is no file nowhere.py",
    ("estimate", "project.py:ridge", "--arg", "rows"): "write it as name=value",
    ("estimate", "project.py:ridge", "--arg", "rows=many"): "rows is 'many': pass a whole number.",
    ("estimate", "project.py:ridge", "--arg", "scaled=1"): "pass true or false.",
    ("estimate", "project.py:literal", "--arg", "kind=c"): "pass one of a, b.",
    ("estimate", "project.py:ridge", "--arg", "lr=1"): "its parameters are strength, rows, path",
    ("estimate", "project.py:plain", "--arg", "lr=1"): "it has no parameters",
    ("estimate", "project.py:ridge", "--arg", "rows=9", "--arg", "rows=8"): "passed twice",
    ("estimate", "project.py:pair_of_others", "--with", "l2"): "a tuple of Objective, int: return",
    ("estimate", "project.py:fit", "--with", "l2"): "is a result already",
    ("estimate", "project.py:watch", "--arg", "epochs=2"): "no row yet",
    ("report", "project.py:watch", "--arg", "epochs=2"): "no row yet",
    ("estimate", "project.py:noisy", "--with", "l2", "--known", "l1=1"): "known",
    ("screen", "project.py:ridge", "--cost", "much"): "--cost is 'much'",
    ("screen", "project.py:ridge", "--start", "project.py"): "holds no weights",
    ("screen", "project.py:fit"): "is a result already",
    ("screen", "project.py:equations", "--cost", "pass"): "--cost cannot be passed with",
    ("report", "project.py:fit", "--with", "l2"): "--with cannot be passed with",
    ("report", "project.py:fit", "--html", "a.html", "--csv", "a.html"): "the same place",
    ("report", "project.py:fit", "--html", "no/a.html"): "there is no folder",
}  # fmt: skip


@pytest.mark.parametrize("call", WRONG, ids=" ".join)
def test_wrong_calls_are_one_line_and_exit_code_two(run, folder, call):
    before = {path.name for path in folder.iterdir()}
    assert WRONG[call] in the_error(run(*call))
    assert {path.name for path in folder.iterdir()} - before <= {"__pycache__"}


def test_the_installed_command_writes_a_report_from_a_file(folder):
    command = [sys.executable, "-m", "tacit", "report", str(folder / "project.py:fit"), "--json"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["strengths"] == pytest.approx({"l2": 0.1}, rel=1e-9)
    assert run.stderr.splitlines() == ["training …", f"wrote {folder / 'report.html'}"]


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("estimate", ["--with", "ridge"], "no regularizer 'ridge'"),
        ("estimate", ["--with", "l2", "--with", "smooth_l1:betta=1"], "is not an option"),
        ("estimate", ["--with", "l2", "--known", "l2"], "write it as l2=5e-5"),
        ("screen", ["--known", "ridge=0.1"], "no regularizer 'ridge'"),
        ("report", ["--with", "layerwise:"], "write layerwise: once"),
    ],
)
def test_what_is_typed_wrongly_is_refused_before_the_users_code_runs(
    run, command, options, expected
):
    result = run(command, "project.py:ridge", *options)
    assert "training …" not in result.stderr
    assert expected in the_error(result)
