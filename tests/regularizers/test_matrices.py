"""Families of rows and matrices: kinks, subspaces, and tensors of more than two dimensions."""

import pytest
import torch
from support.columns import dense_columns, kink_positions, random_params
from support.models import params_of, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.regularizers import (
    group_l2,
    nuclear_norm,
    orthogonality,
    schatten,
    spectral_norm,
    stable_rank,
)

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


@pytest.mark.parametrize(
    "make",
    [group_l2, nuclear_norm, lambda: schatten(0.5), spectral_norm, stable_rank, orthogonality],
)
def test_tensors_of_more_dimensions_are_matrices_by_their_first_dimension(make):
    torch.manual_seed(0)
    kernel = {"w": torch.randn(3, 2, 2, 2, dtype=torch.float64)}
    matrix = {"w": kernel["w"].reshape(3, 8)}
    columns, expected = dense_columns(make(), kernel), dense_columns(make(), matrix)
    torch.testing.assert_close(columns, expected, rtol=0, atol=0)
    torch.testing.assert_close(make().value(kernel), make().value(matrix), rtol=1e-14, atol=0)


def with_singular_values(*values, shape=(4, 3), seed=0, dtype=torch.float64):
    """A matrix with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(
        torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False
    )
    return {"w": (u @ torch.diag(torch.tensor(values).double()) @ vh).to(dtype)}


def test_schatten_of_one_is_the_nuclear_norm_and_of_two_is_ridge_of_matrices():
    low = with_singular_values(2.0, 0.5, 0.0)
    for params in (random_params(PARAMS), low):
        columns = dense_columns(schatten(1), params)
        torch.testing.assert_close(columns, dense_columns(nuclear_norm(), params), rtol=0, atol=0)
        torch.testing.assert_close(
            dense_columns(schatten(2), params),
            dense_columns(tacit.l2(scope=tacit.matrices), params),
            rtol=0,
            atol=0,
        )
    spaces = [make.bind(low).subspace("w") for make in (schatten(1), nuclear_norm())]
    assert [space.dimension for space in spaces] == [10, 10]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("p", "dimension"), [(0.5, 10), (1, 10), (1.05, 10), (2, 12), (3, 12)])
def test_schatten_has_equations_along_the_row_and_column_space_below_two(p, dimension, dtype):
    params = with_singular_values(2.0, 0.5, 0.0, dtype=dtype)
    space = schatten(p).bind(params).subspace("w")
    assert (12 if space is None else space.dimension) == dimension
    assert dense_columns(schatten(p), params).abs().max() < 15
    assert schatten(p).value(params).item() == pytest.approx(2**p + 0.5**p, rel=1e-6)


@pytest.mark.parametrize("make", [spectral_norm, stable_rank])
def test_equal_largest_singular_values_have_equations_where_they_stay_equal(make):
    values = (1.5, 1.5, 1.5, 0.4)
    params = with_singular_values(*values, shape=(5, 4))
    columns = make().bind(params)
    space = columns.subspace("w")
    assert space.dimension == 20 - 5
    project = space.project(torch.eye(20, dtype=torch.float64))
    torch.testing.assert_close(project, project.T, rtol=0, atol=1e-14)
    torch.testing.assert_close(project @ project, project, rtol=0, atol=1e-14)
    assert float(project.trace()) == pytest.approx(15)
    # Along the space the values have the derivative of the column; along others there is none.
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(20, generator=generator, dtype=torch.float64)
    inside, outside = project @ drawn, drawn - project @ drawn
    column = columns.rows("w", slice(0, 20))[:, 0]

    def slopes(direction, step=1e-6):
        moved = [params["w"] + s * step * direction.reshape(5, 4) for s in (1, -1)]
        ahead, behind = (float(make().value({"w": w})) for w in moved)
        start = float(make().value(params))
        return (ahead - start) / step, (start - behind) / step

    assert slopes(inside) == pytest.approx(2 * [float(column @ inside)], rel=1e-4, abs=1e-5)
    ahead, behind = slopes(outside)
    assert abs(ahead - behind) > 0.1


def test_singular_values_within_the_width_are_equal_to_the_largest():
    params = with_singular_values(1.0, 1 - 1e-4, 0.5)
    assert spectral_norm().bind(params).subspace("w") is None
    assert spectral_norm(equal_width=1e-3).bind(params).subspace("w").dimension == 12 - 2
    rounded = with_singular_values(1.0, 1.0, 0.5, dtype=torch.float32)
    assert spectral_norm().bind(rounded).subspace("w").dimension == 12 - 2
    for width in (-1e-9, 1.0, "0"):
        with pytest.raises(tacit.InputError, match="equal_width"):
            spectral_norm(equal_width=width)


def test_too_small_a_width_is_a_problem_of_the_fit_and_not_a_wrong_number():
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 3, bias=False).double()
    model.weight.data = with_singular_values(1.0, 1 - 1e-4, 0.5, shape=(3, 4))["w"]
    u, _, vh = torch.linalg.svd(model.weight.detach(), full_matrices=False)
    # ∇L = −λ U Z Vᵀ of the two largest, with λ = 0.3 and Z = diag(2/3, 1/3)
    pull = 0.3 * (u[:, :2] * torch.tensor([2.0, 1.0]).double() / 3) @ vh[:2]
    gram = X.T @ X / 60
    y = X @ (model.weight.detach() + 3 / 2 * pull @ torch.linalg.inv(gram)).T
    fit = tacit.estimate(model, F.mse_loss, (X, y), spectral_norm(equal_width=1e-3))
    assert fit.strengths["spectral_norm"] == pytest.approx(0.3, rel=1e-6)
    assert not fit.problems
    fit = tacit.estimate(model, F.mse_loss, (X, y), spectral_norm())
    assert fit.strengths["spectral_norm"] == pytest.approx(0.2, rel=1e-3)
    assert "unexplained" in {problem.kind for problem in fit.problems}


def test_stable_rank_has_no_column_at_rank_one_at_orthogonal_matrices_and_for_vectors():
    for values in ((2.0, 0.0, 0.0), (2.0, 2.0, 2.0)):
        assert not dense_columns(stable_rank(), with_singular_values(*values)).any()
    with pytest.raises(tacit.InputError, match="none of the parameters"):
        stable_rank().bind({"w": torch.ones(1, 5), "v": torch.ones(5, 1)})
    zero = stable_rank().bind({"w": torch.zeros(3, 2)})
    assert zero.subspace("w").dimension == 0


def test_orthogonality_has_no_column_at_orthonormal_weights():
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(5, 3, generator=generator, dtype=torch.float64))[0]
    for matrix in (q, q.T, q.float()):
        assert not dense_columns(orthogonality(), {"w": matrix}).any()
    assert orthogonality().value({"w": q}).item() == pytest.approx(0, abs=1e-14)
    assert orthogonality().value({"w": q.T}).item() == pytest.approx(2)


def test_reasons_that_do_not_combine_are_refused():
    model = nn.Linear(3, 4, bias=False).double()
    model.weight.data = with_singular_values(1.0, 1.0, 0.0)["w"]
    data = torch.randn(6, 3).double(), torch.randn(6, 4).double()
    with pytest.raises(tacit.InputError, match="low rank, equal largest"):
        tacit.estimate(model, F.mse_loss, data, [nuclear_norm(), spectral_norm()])
