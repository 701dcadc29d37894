"""Equations can be stacked, restricted to layers, steps and columns, and lose no precision."""

import copy
import pickle

import pytest
import torch
from support.candidates import dense_rows, make_candidates, network_with_objective
from support.descent import descend
from support.models import params_of, random_data, tanh_mlp
from support.systems import assert_same_equations
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference


def test_a_layer_is_a_module_and_drops_columns_that_are_zero_there():
    model, _, objective = network_with_objective()
    family = tacit.layerwise(tacit.l2())
    fit = tacit.fit(tacit.endpoint_equations(objective, [family, tacit.l2(name="all")]))
    assert list(fit.layers) == ["0", "2", "4"]
    assert set(fit.layers["2"].strengths) == {"l2[2]", "all"}
    layer_fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()])).layers["2"]
    params = {n: p for n, p in params_of(model).items() if n.startswith("2.")}
    gradient = {n: g for n, g in objective.gradient().items() if n.startswith("2.")}
    theta, target = reference.flat(params), -reference.flat(gradient)
    assert layer_fit.strengths["l2"] == pytest.approx(float(theta @ target / (2 * theta @ theta)))
    assert layer_fit.rows == len(theta)


def test_factors_of_all_layers_have_the_products_of_each_layer():
    torch.manual_seed(1)
    model = tanh_mlp(1)
    objective = tacit.Objective(model, F.mse_loss, random_data(1))
    families = [
        tacit.l2(),
        tacit.layerwise(tacit.smooth_l1(0.1)),
        tacit.regularizers.nuclear_norm(),
    ]
    parts = [
        tacit.endpoint_equations(objective, families, params=point)
        for point in (params_of(model), {n: 1.1 * p for n, p in params_of(model).items()})
    ]
    equations = tacit.stack(parts)
    factors = equations.layer_factors()
    assert len(factors) == len(equations.layers) > 1
    for label, factor in zip(equations.layers, factors, strict=True):
        layer = equations.layer(label)
        columns = [equations.names.index(name) for name in layer.names] + [len(equations.names)]
        assert not factor[:, [c for c in range(factor.shape[1]) if c not in columns]].any()
        small, part = layer.factor(), factor[:, columns]
        torch.testing.assert_close(part.T @ part, small.T @ small, rtol=1e-12, atol=1e-14)


def test_stacking_shares_one_strength_between_endpoints():
    parts, rows = [], []
    for seed in (1, 2, 3):
        model, data, objective = network_with_objective(seed)
        parts.append(tacit.endpoint_equations(objective, make_candidates()))
        rows.append(dense_rows(model, data, make_candidates()))
    matrix = torch.cat(rows)
    fit = tacit.fit(tacit.stack(parts))
    expected = reference.fit(matrix[:, :-1], matrix[:, -1])
    assert list(fit.strengths.values()) == pytest.approx(expected.tolist(), rel=1e-8)
    assert "3 stacked" in fit.summary()


def test_penalties_of_one_name_that_differ_do_not_share_a_strength(tmp_path):
    _, _, objective = network_with_objective()
    different = [
        tacit.smooth_l1(1e-3, name="R"),
        tacit.smooth_l1(1e-2, name="R"),
        tacit.l2(name="R"),
        tacit.l1(name="R"),
        tacit.regularizers.group_l2(name="R"),
    ]
    written = [tacit.endpoint_equations(objective, [r]) for r in different]
    for i, first in enumerate(written):
        assert tacit.stack([first, first]).names == ("R",)
        for second in written[:i]:
            with pytest.raises(tacit.InputError, match="different names"):
                tacit.stack([first, second])
    written[0].save(tmp_path / "equations")
    loaded = tacit.Equations.load(tmp_path / "equations")
    assert tacit.stack([loaded, written[0]]).rows == 2 * loaded.rows
    with pytest.raises(tacit.InputError, match=r"beta=0\.01.* does not stack on .*beta=0\.001"):
        tacit.stack([loaded, written[1]])


def test_every_step_of_a_trajectory_is_a_system_of_its_own():
    model, data, step = tanh_mlp(0), random_data(0), 1e-2
    objective = tacit.Objective(model, F.mse_loss, data)
    positions = descend(model, data, step, 3, ridge=0.1)
    trajectory = tacit.Trajectory.from_positions(positions, step)
    equations = tacit.trajectory_equations(objective, trajectory, [tacit.l2()])
    singles = [
        tacit.trajectory_equations(
            objective, tacit.Trajectory.from_positions(positions[t : t + 2], step), [tacit.l2()]
        )
        for t in range(3)
    ]
    stacked = tacit.stack([singles[0], equations])
    for steps in (equations.steps(), stacked.steps(source=1)):
        assert [part.rows for part in steps] == [single.rows for single in singles]
        for part, single in zip(steps, singles, strict=True):
            assert torch.equal(part.factor(), single.factor())
    assert len(stacked.steps(source=0)) == 1


def test_the_same_model_and_data_give_the_same_bytes():
    def make_factor():
        _, _, objective = network_with_objective(5)
        return tacit.endpoint_equations(objective, make_candidates()).factor()

    assert torch.equal(make_factor(), make_factor())


def test_equations_are_pickled_where_the_loss_and_the_loader_cannot_be():
    class LocalBatches:
        def __iter__(self):
            return iter([random_data(9)])

    model = tanh_mlp(9)
    objective = tacit.Objective(
        model, lambda output, target: F.mse_loss(output, target), LocalBatches()
    )
    equations = tacit.endpoint_equations(objective, [tacit.l2(), tacit.smooth_l1(0.1)])
    for part in (objective.loss, objective.data):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle.dumps(part)
    assert_same_equations(pickle.loads(pickle.dumps(equations)), equations)
    assert_same_equations(copy.deepcopy(equations), equations)
    fit = tacit.fit(equations)
    assert pickle.loads(pickle.dumps(fit)) == fit
    assert equations.origin is not None  # the copies have none, the original still has


def test_a_small_pickle_has_neither_the_weights_nor_the_data():
    model = nn.Linear(500, 40).double()
    objective = tacit.Objective(
        model, F.mse_loss, random_data(10, count=50, inputs=500, outputs=40)
    )
    equations = tacit.endpoint_equations(objective, tacit.l2())
    assert len(pickle.dumps(equations)) < 10_000
