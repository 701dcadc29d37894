"""The trace of the Hessian: exact, and from probes."""

import pytest
import torch
from support.columns import dense_columns
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.regularizers import hessian, hessian_trace

MODEL, DATA = tanh_mlp(0, sizes=(3, 4, 2)), random_data(1, count=9, inputs=3, outputs=2)
OBJECTIVE = tacit.Objective(MODEL, F.mse_loss, DATA, batch_size=4)
PARAMS = params_of(MODEL)


def dense_trace(params, of=None):
    hessian = reference.hessian(loss_of(MODEL, F.mse_loss, DATA), params)
    names = tacit.objective.params.select(params, of, what="of")
    mask = torch.cat([torch.full((p.numel(),), n in names) for n, p in params.items()])
    return hessian.diagonal()[mask].sum()


def dense_gradient(params, of=None, step=1e-5):
    vector = reference.flat(params)
    moved = [vector + s * step * e for e in torch.eye(len(vector)) for s in (1, -1)]
    traces = torch.stack([dense_trace(reference.unflatten(v, params), of) for v in moved])
    return (traces[::2] - traces[1::2]) / (2 * step)


@pytest.mark.parametrize("of", [None, "0"])
def test_the_exact_trace_and_its_gradient_are_those_of_the_dense_hessian(of):
    penalty = hessian_trace(OBJECTIVE, of=of)
    torch.testing.assert_close(penalty.value(PARAMS)[0], dense_trace(PARAMS, of))
    column = dense_columns(penalty, PARAMS)[:, 0]
    torch.testing.assert_close(column, dense_gradient(PARAMS, of), rtol=1e-6, atol=1e-7)
    assert not penalty.bind(PARAMS).noisy


def test_a_scope_limits_the_rows_and_not_the_trace():
    scoped = hessian_trace(OBJECTIVE, scope="2")
    whole = hessian_trace(OBJECTIVE)
    assert set(scoped.bind(PARAMS).active) == {"2.weight", "2.bias"}
    assert torch.equal(scoped.value(PARAMS), whole.value(PARAMS))
    entries = slice(0, 8)
    assert torch.equal(
        scoped.bind(PARAMS).rows("2.weight", entries), whole.bind(PARAMS).rows("2.weight", entries)
    )


@pytest.mark.parametrize("probes", [None, 16])
def test_passes_over_the_data_do_not_matter(monkeypatch, probes):
    penalty = hessian_trace(OBJECTIVE, probes)
    value, column = penalty.value(PARAMS), dense_columns(penalty, PARAMS)
    monkeypatch.setattr(hessian, "CHUNK", 100)  # four directions
    torch.testing.assert_close(penalty.value(PARAMS), value)
    torch.testing.assert_close(dense_columns(penalty, PARAMS), column)


@pytest.mark.parametrize(("probes", "groups"), [(2, 2), (5, 5), (16, 8), (20, 8)])
def test_the_column_is_the_mean_over_groups_and_deviations_are_from_it(probes, groups):
    columns = hessian_trace(OBJECTIVE, probes).bind(PARAMS)
    assert columns.groups == groups
    assert columns.noisy == (0,)
    deviations = columns.deviations("0.weight", slice(2, 7))
    assert deviations.shape == (5, groups, 1)
    torch.testing.assert_close(deviations.sum(1), torch.zeros(5, 1, dtype=torch.float64))
    assert deviations.abs().min(1).values.min() > 0


def test_probes_are_right_on_average_and_their_groups_are_independent():
    exact = dense_columns(hessian_trace(OBJECTIVE), PARAMS)[:, 0]
    columns = hessian_trace(OBJECTIVE, 400).bind(PARAMS)
    slices = {n: slice(0, p.numel()) for n, p in PARAMS.items()}
    mean = torch.cat([columns.rows(n, part)[:, 0] for n, part in slices.items()])
    spread = torch.cat([columns.deviations(n, part) for n, part in slices.items()])
    noise = spread.square().sum() / (8 * 7)  # the expected square of the mean's error
    error = (mean - exact).square().sum()
    assert error < 4 * noise
    assert noise < 0.04 * exact.square().sum()


def test_the_same_seed_gives_the_same_bytes_and_other_points_have_other_probes():
    first, again, other = (
        dense_columns(hessian_trace(OBJECTIVE, 4, seed=s), PARAMS) for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    moved = {n: p + 1e-9 for n, p in PARAMS.items()}
    assert not torch.allclose(first, dense_columns(hessian_trace(OBJECTIVE, 4, seed=1), moved))


def test_the_value_from_probes_has_the_gradient_that_retraining_needs():
    penalty = hessian_trace(OBJECTIVE, 3)
    gradient = reference.design([penalty], PARAMS)[:, 0]
    vector, step = reference.flat(PARAMS), 1e-5
    direction = torch.randn(len(vector), generator=torch.Generator().manual_seed(0)).double()
    ahead, behind = (
        penalty.value(reference.unflatten(vector + s * step * direction, PARAMS)) for s in (1, -1)
    )
    assert float(gradient @ direction) == pytest.approx(
        float(ahead - behind) / (2 * step), rel=1e-6
    )


def test_influence_is_the_derivative_by_the_weight_of_an_example():
    """With weights w_i, the mean is over Σw_i, so that a derivative has a part that all share."""
    direction = {n: torch.randn_like(p) for n, p in PARAMS.items()}
    penalty = hessian_trace(OBJECTIVE, 3)
    influence = penalty.influence(PARAMS, [direction])[:, 0, 0]
    weights, products = torch.ones(9, dtype=torch.float64), []
    for i in range(3):
        pair = []
        for step in (1e-4, -1e-4):
            moved = weights.clone()
            moved[i] += step
            weighted = tacit.Objective(MODEL, F.mse_loss, DATA, weights=moved)
            column = hessian_trace(weighted, 3).gradient(PARAMS)["hessian_trace"]
            pair.append(reference.flat(column) @ reference.flat(direction))
        products.append(9 * (pair[0] - pair[1]) / 2e-4)
    expected = torch.stack(products)
    torch.testing.assert_close(influence[:3].diff(), expected.diff(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("probes", [1, 0, 2.0, True])
def test_a_number_of_probes_whose_noise_cannot_be_measured_is_refused(probes):
    with pytest.raises(tacit.InputError, match="probes"):
        hessian_trace(OBJECTIVE, probes)


def test_many_parameters_have_probes_by_default():
    model = tanh_mlp(0, sizes=(3, 128, 1))
    objective = tacit.Objective(model, F.mse_loss, random_data(1, count=4, inputs=3))
    assert hessian_trace(objective).bind(objective.point()).groups == 8
    assert not hessian_trace(objective, of="2").bind(objective.point()).noisy


def test_weights_whose_entries_are_not_in_order_have_the_same_trace():
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(2, 3, 2), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    model = torch.nn.Sequential(*layers).double()
    data = torch.randn(6, 2, 3, 3).double(), torch.randn(6, 2).double()
    columns = []
    for layout in (torch.contiguous_format, torch.channels_last):
        objective = tacit.Objective(model.to(memory_format=layout), F.mse_loss, data)
        columns.append(dense_columns(hessian_trace(objective, of="0"), objective.params))
    assert not model[0].weight.is_contiguous()
    torch.testing.assert_close(*columns)


def test_traces_over_different_parameters_do_not_stack():
    first, second = (
        tacit.endpoint_equations(OBJECTIVE, hessian_trace(OBJECTIVE, of=of)) for of in ("0", "2")
    )
    with pytest.raises(tacit.InputError, match=r"hessian_trace\(of='2'\)\) does not stack on"):
        tacit.stack([first, second])
