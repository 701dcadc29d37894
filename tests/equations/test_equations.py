"""Equations are small, can be stacked, cut by layer, saved and loaded, and lose nothing."""

import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.equations import rows as assembly


def problem(seed=0, sizes=(5, 8, 6, 1)):
    model, data = tanh_mlp(seed, sizes), random_data(seed)
    return model, data, tacit.Objective(model, F.mse_loss, data)


def candidates():
    return [tacit.l2(), tacit.smooth_l1(0.05), tacit.l2(scope="*.bias", name="biases")]


def dense_rows(model, data, regularizers):
    params = params_of(model)
    target = reference.endpoint_target(loss_of(model, F.mse_loss, data), params)
    return torch.cat([reference.design(regularizers, params), target[:, None]], dim=1)


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**21])
def test_slices_of_any_size_give_the_dense_inner_products(chunk, monkeypatch):
    monkeypatch.setattr(assembly, "CHUNK", chunk)
    model, data, objective = problem()
    equations = tacit.endpoint_equations(objective, candidates())
    rows = dense_rows(model, data, candidates())
    factor = equations.factor()
    torch.testing.assert_close(factor.T @ factor, rows.T @ rows, rtol=1e-11, atol=1e-13)
    assert equations.rows == len(rows)


def test_a_block_holds_a_few_numbers_whatever_the_parameter_count():
    _, _, objective = problem(sizes=(5, 300, 300, 1))
    equations = tacit.endpoint_equations(objective, candidates())
    assert equations.rows > 90_000
    assert sum(block.factor.numel() for block in equations.blocks) <= 3 * 4 * 4


def test_a_layer_is_the_owning_module_and_drops_what_vanishes_there():
    model, _, objective = problem()
    family = tacit.layerwise(tacit.l2())
    found = tacit.fit(tacit.endpoint_equations(objective, [family, tacit.l2(name="all")]))
    assert list(found.layers) == ["0", "2", "4"]
    part = found.layers["2"]
    assert set(part.strengths) == {"l2[2]", "all"}
    only = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()])).layers["2"]
    params = {n: p for n, p in params_of(model).items() if n.startswith("2.")}
    slope = {n: g for n, g in objective.gradient().items() if n.startswith("2.")}
    theta, target = reference.flat(params), -reference.flat(slope)
    assert only.strengths["l2"] == pytest.approx(float(theta @ target / (2 * theta @ theta)))
    assert only.rows == len(theta)


def test_stacking_shares_one_strength_between_endpoints():
    parts, rows = [], []
    for seed in (1, 2, 3):
        model, data, objective = problem(seed)
        parts.append(tacit.endpoint_equations(objective, candidates()))
        rows.append(dense_rows(model, data, candidates()))
    dense = torch.cat(rows)
    found = tacit.fit(tacit.stack(parts))
    expected = reference.fit(dense[:, :-1], dense[:, -1])
    assert list(found.strengths.values()) == pytest.approx(expected.tolist(), rel=1e-8)
    assert "3 stacked" in found.summary()


def test_saved_and_loaded_equations_fit_identically(tmp_path):
    _, _, objective = problem()
    twin = tacit.endpoint_equations(objective, candidates(), known={tacit.l2(): 1e-3})
    stacked = tacit.stack([twin, tacit.endpoint_equations(objective, candidates())])
    stacked.save(tmp_path / "equations.safetensors")
    again = tacit.Equations.load(tmp_path / "equations.safetensors")
    before, after = tacit.fit(stacked), tacit.fit(again)
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


def test_params_of_another_point_are_used():
    model, data, objective = problem()
    other = {n: 2 * p for n, p in params_of(model).items()}
    equations = tacit.endpoint_equations(objective, candidates(), params=other)
    direct = tacit.Objective(model, F.mse_loss, data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert tacit.fit(equations) == tacit.fit(tacit.endpoint_equations(direct, candidates()))


def test_the_same_seed_gives_the_same_bytes():
    def run():
        _, _, objective = problem(5)
        return tacit.endpoint_equations(objective, candidates()).factor()

    assert torch.equal(run(), run())
