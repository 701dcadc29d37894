"""Equations survive saving and loading, and files are written whole or not at all."""

import pytest
import torch
from safetensors.torch import save_file
from support.bad_calls import OBJECTIVE, X, assert_refused
from support.candidates import make_candidates, network_with_objective
from support.models import random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import InputError

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


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    with pytest.raises(InputError, match=r"cannot be written to .*nowhere.*folder that exists"):
        EQUATIONS.save(tmp_path / "nowhere" / "equations")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"cannot be written to .*folder"):
        EQUATIONS.save(tmp_path / "folder")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
