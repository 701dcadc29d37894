"""Group lasso and nuclear norm: kinks, and tensors of more than two dimensions."""

import pytest
import torch
from support.columns import dense_columns, kink_positions, random_params
from support.models import params_of, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.regularizers import group_l2, nuclear_norm

PARAMS = params_of(tanh_mlp(0, sizes=(3, 4, 2)))


def test_group_l2_has_kinks_only_at_zero_rows():
    params = random_params(PARAMS)
    params["0.weight"][1] = 0
    params["2.weight"][0, 1:] = 0
    params["2.bias"][1] = 0
    assert kink_positions(group_l2(), params) == {
        "0.weight": [[1, 0], [1, 1], [1, 2]],
        "2.bias": [[1]],
    }


def test_groups_up_to_the_zero_width_are_zero():
    params = random_params(PARAMS)
    params["0.weight"][1] *= 1e-12
    rows = [[1, 0], [1, 1], [1, 2]]
    assert kink_positions(group_l2(), params) == {"0.weight": rows}
    assert kink_positions(group_l2(zero_width=0), params) == {}
    params["0.weight"][1] *= 1e6
    assert kink_positions(group_l2(), params) == {}
    assert kink_positions(group_l2(zero_width=1e-4), params) == {"0.weight": rows}


def test_nuclear_norm_has_equations_along_the_row_and_column_space_at_deficient_rank():
    params = random_params(PARAMS)
    params["0.weight"][:, 2] = params["0.weight"][:, 0] - 2 * params["0.weight"][:, 1]
    columns = nuclear_norm().bind(params)
    assert columns.subspace("2.weight") is None
    space = columns.subspace("0.weight")
    assert space.dimension == 2 * (4 + 3 - 2)
    project = space.project(torch.eye(12, dtype=torch.float64))
    torch.testing.assert_close(project, project.T, rtol=0, atol=1e-14)
    torch.testing.assert_close(project @ project, project, rtol=0, atol=1e-14)
    assert float(project.trace()) == pytest.approx(space.dimension)
    # Along the space the norm has the derivative that the column says.
    direction = (project @ torch.randn(12, generator=torch.Generator().manual_seed(0)).double())[
        :, None
    ]
    step = 1e-6 * direction.reshape(4, 3)
    ends = [torch.linalg.matrix_norm(params["0.weight"] + s * step, ord="nuc") for s in (1, -1)]
    column = columns.rows("0.weight", slice(0, 12))
    assert float(ends[0] - ends[1]) / 2e-6 == pytest.approx(float(column.T @ direction), rel=1e-6)


def test_singular_values_up_to_the_zero_width_are_zero():
    u, _, vh = torch.linalg.svd(random_params(PARAMS)["0.weight"], full_matrices=False)
    params = {"w": u @ torch.diag(torch.tensor([1.0, 0.5, 1e-7]).double()) @ vh}
    assert nuclear_norm().bind(params).subspace("w") is None
    assert nuclear_norm(zero_width=1e-6).bind(params).subspace("w").dimension == 10


def factored(seed, strength, inner=5, noise=0.3):
    """A linear map W = U Vᵀ of low rank, minimised under weight decay of U and V, and its data."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    X = draw(50, 8)
    y = X @ (draw(6, 2) @ draw(2, 8)).T + noise * draw(50, 6)
    U, V = (0.5 * draw(6, inner)).requires_grad_(), (0.5 * draw(8, inner)).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [U, V], max_iter=2000, tolerance_grad=1e-12, tolerance_change=0, history_size=50,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        decay = strength / 2 * (U.square().sum() + V.square().sum())
        loss = F.mse_loss(X @ V @ U.T, y) + decay
        loss.backward()
        return loss

    optimizer.step(closure)
    model = nn.Linear(8, 6, bias=False).double()
    model.weight.data = (U @ V.T).detach()
    return model, (X, y)


@pytest.mark.parametrize("seed", [0, 1])
def test_weight_decay_of_two_factors_is_the_nuclear_norm_of_their_product_of_low_rank(seed):
    model, data = factored(seed, 0.3)
    assert int(torch.linalg.matrix_rank(model.weight, rtol=1e-8)) == 2
    fit = tacit.estimate(model, F.mse_loss, data, [nuclear_norm(), tacit.l2()])
    assert fit.strengths["nuclear_norm"] == pytest.approx(0.3, rel=1e-6)
    assert abs(fit.strengths["l2"]) < 1e-6
    assert (fit.rows, fit.problems) == (2 * (6 + 8 - 2), ())


def test_error_bars_of_equations_along_a_subspace_are_those_of_dense_linear_algebra():
    model, (X, y) = factored(0, 0.3)
    penalties = [nuclear_norm(), tacit.l1()]
    fit = tacit.estimate(model, F.mse_loss, (X, y), penalties)
    W = model.weight.detach()
    project = nuclear_norm().bind({"weight": W}).subspace("weight").project
    u, _, vh = torch.linalg.svd(W)
    design = project(torch.stack([(u[:, :2] @ vh[:2]).flatten(), W.sign().flatten()], dim=1))
    # With the mean over outputs, the gradient of an example is (2/6) (Wx − y) xᵀ.
    gradients = ((X @ W.T - y)[:, :, None] * X[:, None] / 3).flatten(1).T
    strengths = -torch.linalg.pinv(design) @ gradients
    expected = dict(zip(fit.strengths, strengths.mean(1).tolist(), strict=True))
    assert dict(fit.strengths) == pytest.approx(expected, rel=1e-9)
    bars = tacit.score_examples(fit).error_bars()
    standard = (strengths.std(1) / 50**0.5).tolist()
    assert list(bars.standard_errors.values()) == pytest.approx(standard, rel=0.03)


def test_a_matrix_that_is_zero_has_no_equations():
    model = nn.Linear(3, 2, bias=False).double()
    nn.init.zeros_(model.weight)
    data = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    with pytest.raises(tacit.InputError, match="nuclear_norm"):
        tacit.estimate(model, F.mse_loss, data, [nuclear_norm()])


def test_zeros_of_single_weights_beside_a_low_rank_leave_no_equation_of_the_matrix():
    model, data = factored(0, 0.3)
    model.weight.data[0] = 0
    fit = tacit.estimate(model, F.mse_loss, data, [nuclear_norm(), tacit.l2()])
    assert fit.rows > 0
    with pytest.raises(tacit.InputError, match="no equations"):
        tacit.estimate(model, F.mse_loss, data, [nuclear_norm(), tacit.l1()])


def test_null_distributions_are_refused_along_a_subspace():
    model, data = factored(0, 0.3)
    fit = tacit.estimate(model, F.mse_loss, data, [nuclear_norm()])
    with pytest.raises(tacit.InputError, match="low rank"):
        tacit.identifiability.null_distribution(fit, "nuclear_norm")


@pytest.mark.parametrize("make", [group_l2, nuclear_norm])
def test_tensors_of_more_dimensions_are_matrices_by_their_first_dimension(make):
    torch.manual_seed(0)
    kernel = {"w": torch.randn(3, 2, 2, 2, dtype=torch.float64)}
    matrix = {"w": kernel["w"].reshape(3, 8)}
    columns, expected = dense_columns(make(), kernel), dense_columns(make(), matrix)
    torch.testing.assert_close(columns, expected, rtol=0, atol=0)
    torch.testing.assert_close(make().value(kernel), make().value(matrix), rtol=1e-14, atol=0)
