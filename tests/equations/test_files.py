"""Equations survive saving and loading; files are written whole or not at all, and checked."""

import json
import resource
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.bad_calls import OBJECTIVE, X, assert_refused
from support.candidates import make_candidates, network_with_objective
from support.models import random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import InputError
from tacit.equations import files

EQUATIONS = tacit.endpoint_equations(OBJECTIVE, tacit.l2())


def test_saved_and_loaded_equations_fit_identically(tmp_path):
    _, _, objective = network_with_objective()
    with_known = tacit.endpoint_equations(objective, make_candidates(), known={tacit.l2(): 1e-3})
    stacked = tacit.stack([with_known, tacit.endpoint_equations(objective, make_candidates())])
    stacked.save(tmp_path / "equations.safetensors")
    loaded = tacit.Equations.load(tmp_path / "equations.safetensors")
    before, after = tacit.fit(stacked), tacit.fit(loaded)
    assert before == after
    assert before.summary() == after.summary()
    assert before.layers.keys() == after.layers.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["equations.safetensors"]


def test_a_matrix_survives_saving(tmp_path):
    model, data = tanh_mlp(4, (3, 1)), random_data(4, inputs=3)
    objective = tacit.Objective(model, F.mse_loss, data)
    equations = tacit.endpoint_equations(
        objective, [tacit.regularizers.symmetric(scope="0.weight")]
    )
    equations.save(tmp_path / "matrix")
    loaded = tacit.fit(tacit.Equations.load(tmp_path / "matrix"))
    assert torch.equal(loaded.matrix(), tacit.fit(equations).matrix())
    assert loaded.matrix().shape == (3, 3)


def test_files_that_hold_no_equations_are_refused(tmp_path):
    complete = tmp_path / "complete"
    EQUATIONS.save(complete)
    contents = {"cut": complete.read_bytes()[:-9], "empty": b"", "text": b"strengths: many" * 9}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    save_file({"w": X}, tmp_path / "foreign", metadata={"format": "pt"})
    for name in [*contents, "missing", ""]:
        assert_refused(
            lambda name=name: tacit.Equations.load(tmp_path / name),
            [str(tmp_path / name), "no equations"],
            "Equations.save",
        )
    assert_refused(
        lambda: tacit.Equations.load(tmp_path / "foreign"),
        ["foreign", "not written by", "'pt'"],
        "Equations.save",
    )


def test_equations_that_are_stacked_on_themselves_can_be_saved(tmp_path):
    twice = tacit.stack([EQUATIONS, EQUATIONS])
    twice.save(tmp_path / "twice")
    assert tacit.fit(tacit.Equations.load(tmp_path / "twice")) == tacit.fit(twice)


@pytest.mark.parametrize("path", [None, 3, b"bytes"])
def test_what_is_no_path_is_refused(path):
    for call in (EQUATIONS.save, tacit.Equations.load):
        assert_refused(partial(call, path), ["path is"], "pass the path of a file")


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    with pytest.raises(InputError, match=r"nowhere.* cannot be written to .*folder that exists"):
        EQUATIONS.save(tmp_path / "nowhere" / "equations")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"folder cannot be written to .*directory"):
        EQUATIONS.save(tmp_path / "folder")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def edited(header, *path, to):
    """The header with one value replaced; the last part of the path may be new."""
    header = json.loads(json.dumps(header))
    inner = header
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return header


def save_made_up(path, header, factors):
    """A file that has the right format and checksum, whatever it holds."""
    head = header if isinstance(header, str) else json.dumps(header)
    metadata = {"format": files.EQUATIONS, "head": head, "sha256": files._checksum(head, factors)}
    save_file({str(i): f for i, f in enumerate(factors)}, path, metadata=metadata)


def header_and_factors(path):
    EQUATIONS.save(path)
    return files.read_file(path, files.EQUATIONS)


MADE_UP = {
    # path of the value, its new value, and what the error names
    "no targets": (["targets"], 0, "no columns, targets"),
    "targets that are no number": (["targets"], "1", "targets of the head is '1'"),
    "many targets": (["targets"], 10**9, "a matrix of (2, 2)"),
    "a boolean": (["targets"], True, "targets of the head is 'True'"),
    "a half target": (["targets"], 1.5, "targets of the head is '1.5'"),
    "no names": (["names"], [], "no columns"),
    "names that are no list": (["names"], "l2", "names of the head is 'l2'"),
    "a name too many": (["names"], ["l2", "l1"], "do not have 2 columns"),
    "two columns of one name": (["names"], ["l2", "l2"], "the same name"),
    "an empty name": (["names"], [""], "the same name, or none"),
    "half a character": (["names"], ["\ud800"], "number 0 of names"),
    "null": (["blocks"], None, "blocks is 'None'"),
    "no blocks": (["blocks"], [], "2 blocks and 4 matrices"),
    "a block that is a list": (["blocks", 0], [], "number 0 of blocks is '[]'"),
    "a negative count": (["blocks", 0, "rows"], -6, "rows of number 0 of blocks"),
    "too few rows": (["blocks", 0, "rows"], 1, "has 1 rows, 2 columns and a matrix of (2, 2)"),
    "an endless count": (["blocks", 0, "rows"], 10**30, "rows of number 0 of blocks"),
    "a floor that is no number": (["blocks", 0, "floor"], float("nan"), "floor of number 0"),
    "an infinite floor": (["blocks", 0, "floor"], float("inf"), "floor of number 0"),
    "a floor past float64": (["blocks", 0, "floor"], 10**400, "floor of number 0"),
    "a floor past its square": (["blocks", 0, "floor"], 1e200, "floor of number 0"),
    "a negative floor": (["blocks", 0, "floor"], -1.0, "a negative floor"),
    "a column that is missing": (["blocks", 0, "columns"], [1], "repeated or missing"),
    "a negative column": (["blocks", 0, "columns"], [-1], "columns of number 0"),
    "no columns": (["blocks", 0, "columns"], [], "a matrix of (2, 2)"),
    "a source that is missing": (["blocks", 0, "source"], 1, "of source 1"),
    "an unknown part": (["blocks", 0, "colour"], 1, "unknown parts: 'colour'"),
    "the factor in the head": (["blocks", 0, "factor"], [[1.0]], "factor of number 0"),
    "sources by name": (["sources"], {"first": 1}, "sources of the head"),
    "no sources": (["sources"], [], "no columns, targets, sources"),
    "an unknown mode": (["sources", 0, "mode"], "sideways", "'sideways'"),
    "a norm past its square": (["sources", 0, "gradient_norm"], 1e200, "gradient_norm of number"),
    "a negative norm": (["sources", 0, "gradient_norm"], -1, "gradient_norm of a source is neg"),
    "a strength that is no number": (["sources", 0, "known"], {"l2": "1"}, "'l2' of known"),
    "a switch that is no boolean": (["sources", 0, "epoch"], "yes", "epoch of number 0"),
    "a layer that is a number": (["sources", 0, "layer"], 3, "layer of number 0"),
    "unreached by letters": (["sources", 0, "unreached"], "abc", "unreached of number 0"),
    "an unknown kind": (["families", 0, "kind"], "cubic", "'cubic'"),
    "a family of no columns": (["families", 0, "size"], 0, "do not have 1 columns"),
    "a family of no columns beside others": (
        ["families"], [{"name": n, "kind": n, "size": k} for k, n in enumerate(("l1", "l2"))],
        "a family of 0 columns",
    ),
    "a family without a name": (["families", 0], {"size": 1}, "unknown parts: 'kind, name'"),
    "a knot too many": (["families", 0, "shape"], {"knots": [0.1, 0.2]}, "2 knots of 1 columns"),
    "no knots": (["families", 0, "shape"], {"knots": [], "even": True}, "0 knots of 1 columns"),
    "a knot below zero": (["families", 0, "shape"], {"knots": [-1], "even": True}, "1 knots of 1"),
    "a bound that is missing": (["families", 0, "shape"], {
        "knots": [1], "even": True, "convex": True}, "1 knots of 1 columns"),
    "knots of something else": (["families", 0, "shape"], {"knots": [1], "of": "x"}, "1 knots of"),
    "bounds for two": (["families", 0, "bounded"], [True, False], "2 of 1 columns have bounds"),
    "counts below zero": (["sources", 0, "counts"], {"l2": [-1]}, "counts of number 0"),
    "no other families": (["other_families"], [], "repeated or missing"),
    "an alternative of few columns": (["alternatives", 0, "columns"], [0], "a matrix of"),
    "something more": (["extra"], 1, "unknown parts: 'extra'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE_UP)
def test_a_made_up_head_is_refused(tmp_path, name):
    header, factors = header_and_factors(tmp_path / "complete")
    path, value, words = MADE_UP[name]
    header = edited(header, *path, to=value)
    save_made_up(tmp_path / "made up", header, factors)
    assert_refused(
        lambda: tacit.Equations.load(tmp_path / "made up"),
        [str(tmp_path / "made up"), "is damaged", words],
        "Write the equations again",
    )


@pytest.mark.parametrize(
    ("head", "matrices", "words"),
    [
        ("{", None, "Expecting property name"),
        ("[" * 100_000, None, "nested too deeply"),
        ("[]", None, "the head is '[]'"),
        ("{}", None, "blocks is 'None'"),
        ("1" * 5000, None, "digits"),
        ('{"targets": 1, "targets": 1}', None, "a key twice"),
        ('{"blocks": ' + "[" * 900 + "]" * 900 + "}", None, "number 0 of blocks"),
        (None, [], "4 blocks and 0 matrices"),
        (None, ["float32"], "not in float64"),
        (None, [(), (2, 2)], "a matrix of ()"),
        (None, [(2,), (2, 2)], "a matrix of (2,)"),
        (None, [(5, 2), (2, 2)], "a matrix of (5, 2)"),
        (None, [(0, 3), (2, 2)], "a matrix of (0, 3)"),
        (None, [float("nan"), (2, 2)], "not finite"),
        (None, [float("inf"), (2, 2)], "not finite"),
    ],
)
def test_a_made_up_file_is_refused(tmp_path, head, matrices, words):
    header, factors = header_and_factors(tmp_path / "complete")
    for i, change in enumerate(matrices or ()):
        if isinstance(change, float):
            factors[i] = torch.full_like(factors[i], change)
        else:
            shape = (2, 2) if change == "float32" else change
            factors[i] = torch.ones(shape, dtype=torch.float64)
            factors[i] = factors[i].float() if change == "float32" else factors[i]
    save_made_up(tmp_path / "made up", head or header, [] if matrices == [] else factors)
    assert_refused(
        lambda: tacit.Equations.load(tmp_path / "made up"),
        [str(tmp_path / "made up"), words],
        "Write the equations again",
    )


def test_names_and_formats_of_other_files_are_refused(tmp_path):
    EQUATIONS.save(tmp_path / "complete")
    tensors = load_file(tmp_path / "complete")
    metadata = {"format": files.EQUATIONS, "head": "{}", "sha256": "0"}
    for name, change in {
        "unnumbered": ({"a": tensors["0"]}, metadata, "not numbered"),
        "checksum": (tensors, metadata, "checksum is wrong"),
        "more metadata": (tensors, metadata | {"note": "x"}, "format, head, note, sha256"),
        "no head": (tensors, {"format": files.EQUATIONS}, "its metadata are 'format'"),
    }.items():
        save_file(change[0], tmp_path / name, metadata=change[1])
        assert_refused(
            lambda name=name: tacit.Equations.load(tmp_path / name),
            [name, "is damaged", change[2]],
            "Write the equations again",
        )


def test_a_small_file_needs_little_memory(tmp_path):
    header, factors = header_and_factors(tmp_path / "complete")
    header["targets"] = 10**9
    for block in header["blocks"]:
        block["rows"] = 0
    empty = [torch.zeros(0, 10**9 + 1, dtype=torch.float64) for _ in factors]
    save_made_up(tmp_path / "made up", header, empty)
    assert (tmp_path / "made up").stat().st_size < 4096
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="GiB of memory"):
        tacit.Equations.load(tmp_path / "made up")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_more_blocks_than_a_file_can_list_are_refused_when_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LIST", 1000)
    with pytest.raises(InputError, match=r"4 tensors, more than one file can list.*stack"):
        EQUATIONS.save(tmp_path / "equations")
    assert not list(tmp_path.iterdir())


def test_a_disk_without_space_is_named_and_keeps_the_earlier_file(tmp_path):
    """A limit on the size of files acts as a full disk does."""
    path = tmp_path / "equations"
    EQUATIONS.save(path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(InputError) as error:
            EQUATIONS.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{path} cannot be written to (File too large)" in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["equations"]
    assert path.read_bytes() == before
