"""Certificates: closed forms of least squares, dense and Lanczos eigenvalues, and bounds."""

import pytest
import torch
from support.models import elastic_net, loss_of, minimise, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference
from tacit.validation import curvature
from tacit.validation.certificate import certify, certify_least_squares
from tacit.validation.penalised import PenalisedObjective, penalty


def linear_objective(theta, X, y):
    model = nn.Linear(len(theta), 1, bias=False).double()
    model.weight.data.copy_(theta[None])
    return tacit.Objective(model, F.mse_loss, (X, y))


def diagonal_strengths(values):
    names = tacit.regularizers.diagonal().bind({"weight": torch.zeros(1, len(values))}).names
    return dict(zip(names, values, strict=True))


def penalised_gram(X, matrix):
    return X.T @ X / len(X) + matrix


def rank_deficient(seed, p=5):
    """Inputs of which the last column repeats the first."""
    X, y = random_data(seed, inputs=p)
    X[:, -1] = X[:, 0]
    return X, y


# Least squares, by the closed form.


def test_least_squares_with_ridge_is_strongly_convex_with_the_known_minimiser():
    X, y = random_data(0)
    certificate = certify_least_squares(X, y, 0.3 * torch.eye(5).double())
    A = penalised_gram(X, 0.3 * torch.eye(5).double())
    assert certificate.verdict == "strongly convex"
    assert certificate.eigenvalues == pytest.approx(torch.linalg.eigvalsh(A).tolist(), rel=1e-12)
    torch.testing.assert_close(
        A @ certificate.minimiser, X.T @ y[:, 0] / len(X), rtol=0, atol=1e-13
    )
    assert certificate.kernel.shape == (5, 0)


def test_a_singular_problem_has_the_affine_set_of_minimisers():
    X, y = rank_deficient(1)
    certificate = certify_least_squares(X, y, torch.zeros(5, 5), params=torch.zeros(5))
    assert certificate.verdict == "not unique"
    assert certificate.kernel.shape == (5, 1)
    expected = torch.linalg.pinv(X) @ y[:, 0]
    torch.testing.assert_close(certificate.minimiser, expected, rtol=0, atol=1e-11)
    other = certificate.minimiser + 7.0 * certificate.kernel[:, 0]
    at_other = certify_least_squares(X, y, torch.zeros(5, 5), params=other)
    assert at_other.distance == pytest.approx(0, abs=1e-12)
    assert certificate.distance == pytest.approx(float(expected.norm()), rel=1e-9)


def test_a_singular_problem_with_a_gradient_along_its_kernel_is_unbounded():
    X, y = random_data(2)
    direction = X.T @ y[:, 0]
    direction /= direction.norm()
    A = penalised_gram(X, 0)
    curvature_along = direction @ A @ direction
    # This Λ makes A + Λ flat exactly along the gradient of the loss at zero.
    matrix = -torch.outer(A @ direction, A @ direction) / curvature_along
    certificate = certify_least_squares(X, y, matrix, params=torch.zeros(5))
    assert min(map(abs, certificate.eigenvalues)) < 1e-14
    assert certificate.verdict == "unbounded"
    assert certificate.minimiser is None
    assert certificate.distance is None


def test_a_negative_eigenvalue_is_unbounded():
    X, y = random_data(3)
    certificate = certify_least_squares(X, y, torch.diag(torch.tensor([-9.0, 1, 1, 1, 1])))
    assert certificate.verdict == "unbounded"
    assert certificate.eigenvalues[0] < 0
    assert "unbounded below" in str(certificate)


def test_only_the_symmetric_part_of_the_matrix_matters():
    X, y = random_data(4)
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(4)).double() / 9
    plain = certify_least_squares(X, y, matrix)
    transposed = certify_least_squares(X, y, matrix.T)
    assert plain.eigenvalues == pytest.approx(transposed.eigenvalues, rel=1e-12)


# Any objective, by its Hessian.


def test_ridge_has_the_known_curvature_and_no_residual_at_its_optimum():
    X, y = random_data(5)
    A = penalised_gram(X, 0.3 * torch.eye(5).double())
    theta = torch.linalg.solve(A, X.T @ y[:, 0] / len(X))
    certificate = certify(linear_objective(theta, X, y), [tacit.l2()], {"l2": 0.3})
    assert certificate.verdict == "strongly convex"
    assert certificate.smallest_eigenvalue == pytest.approx(
        2 * float(torch.linalg.eigvalsh(A)[0]), rel=1e-12
    )
    assert certificate.residual_norm < 1e-14
    assert certificate.method == "dense"
    assert certificate.is_global


@pytest.mark.parametrize("seed", range(20))
def test_the_minimiser_lies_within_the_bounds(seed):
    generator = torch.Generator().manual_seed(seed)
    X, y = random_data(seed)
    matrix = 0.1 * torch.eye(5).double()
    best = torch.linalg.solve(penalised_gram(X, matrix), X.T @ y[:, 0] / len(X))
    theta = best + torch.randn(5, generator=generator, dtype=torch.float64)
    certificate = certify(linear_objective(theta, X, y), [tacit.l2()], {"l2": 0.1})

    def penalised_loss(theta):
        return float((y[:, 0] - X @ theta).square().mean() + theta @ matrix @ theta)

    assert certificate.distance_bound is not None
    assert certificate.gap_bound is not None
    assert float((theta - best).norm()) <= certificate.distance_bound * (1 + 1e-12)
    gap = penalised_loss(theta) - penalised_loss(best)
    assert gap <= certificate.gap_bound * (1 + 1e-12)


@pytest.mark.parametrize(
    ("make_data", "diagonal", "verdict"),
    [
        (random_data, [0.1, 0.2, 0.3, 0.4, 0.5], "strongly convex"),
        (random_data, [-9.0, 0.2, 0.3, 0.4, 0.5], "unbounded"),
        (rank_deficient, [0.0, 0.0, 0.0, 0.0, 0.0], "not unique"),
        (rank_deficient, [1.0, 0.0, 0.0, 0.0, -0.5], "unbounded"),
    ],
)
def test_both_certificates_agree_on_least_squares(make_data, diagonal, verdict):
    X, y = make_data(6)
    theta = torch.ones(5, dtype=torch.float64)
    exact = certify_least_squares(X, y, torch.diag(torch.tensor(diagonal)))
    certificate = certify(
        linear_objective(theta, X, y), [tacit.regularizers.diagonal()], diagonal_strengths(diagonal)
    )
    assert exact.verdict == certificate.verdict == verdict
    assert certificate.smallest_eigenvalue == pytest.approx(2 * exact.eigenvalues[0], abs=1e-6)
    assert (certificate.distance_bound is None) == (verdict != "strongly convex")


def test_a_network_is_locally_unique_with_the_smallest_eigenvalue_of_the_dense_reference():
    data = random_data(7)
    model = tanh_mlp(7)
    minimise(model, F.mse_loss, data, {tacit.l2(): 2e-2})
    objective = tacit.Objective(model, F.mse_loss, data)
    certificate = certify(objective, [tacit.l2()], {"l2": 2e-2})

    def penalised_loss(params):
        return loss_of(model, F.mse_loss, data)(params) + 2e-2 * sum(
            p.square().sum() for p in params.values()
        )

    expected = torch.linalg.eigvalsh(reference.hessian(penalised_loss, objective.params))[0]
    assert certificate.smallest_eigenvalue == pytest.approx(float(expected), rel=1e-9)
    assert certificate.verdict == "locally unique"
    assert not certificate.is_global


@pytest.mark.parametrize("seed", [8, 9])
def test_lanczos_agrees_with_the_dense_hessian(seed, monkeypatch):
    data = random_data(seed)
    model = tanh_mlp(seed, sizes=(5, 9, 1))
    objective = tacit.Objective(model, F.mse_loss, data)
    strengths = {"l2": 1e-2, "smooth_l1": 1e-3}
    regularizers = [tacit.l2(), tacit.smooth_l1(1e-2)]
    dense = certify(objective, regularizers, strengths)
    monkeypatch.setattr(curvature, "DENSE_LIMIT", 10)
    lanczos = certify(objective, regularizers, strengths)
    assert (dense.method, lanczos.method) == ("dense", "Lanczos")
    function = PenalisedObjective(objective, penalty(regularizers, strengths))
    largest = torch.linalg.eigvalsh(function.hessian(function.flatten(objective.params)))[-1]
    assert lanczos.smallest_eigenvalue == pytest.approx(
        dense.smallest_eigenvalue, abs=1e-9 * float(largest)
    )
    assert lanczos.verdict == dense.verdict
    assert certify(objective, regularizers, strengths) == lanczos  # same seed, same numbers


def test_a_saddle_and_a_point_that_is_not_stationary_are_not_a_minimum():
    X, y = random_data(10)
    model = tanh_mlp(10)
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    saddle = {n: torch.zeros_like(p) for n, p in objective.params.items()}
    saddle["2.bias"] = y.mean().reshape(1)
    certificate = certify(objective, [tacit.l2(scope="*.weight")], {"l2": 1e-3}, params=saddle)
    assert certificate.residual_norm < 1e-14
    assert certificate.smallest_eigenvalue < 0
    assert certificate.verdict == "not a minimum"
    assert certify(objective, [tacit.l2()], {"l2": 5.0}).verdict == "not a minimum"


def test_stated_convexity_gives_a_global_verdict_and_is_checked_at_the_weights():
    X, _ = random_data(11)
    y = (X[:, 0] > 0).long()
    torch.manual_seed(11)
    model = nn.Linear(5, 2).double()
    minimise(model, F.cross_entropy, (X, y), {tacit.l2(): 1e-2})
    objective = tacit.Objective(model, F.cross_entropy, (X, y))
    stated = certify(objective, [tacit.l2()], {"l2": 1e-2}, convex=True)
    assert stated.verdict == "convex, positive definite"
    assert certify(objective, [tacit.l2()], {"l2": 1e-2}).verdict == "locally unique"
    with pytest.raises(tacit.InputError, match="not convex"):
        certify(objective, [tacit.l2()], {"l2": -1.0}, convex=True)


def test_a_lasso_like_penalty_is_not_quadratic():
    X, y = random_data(12)
    theta = torch.ones(5, dtype=torch.float64)
    regularizers = [tacit.smooth_l1(1e-3)]
    assert not is_quadratic(linear_objective(theta, X, y), regularizers, {"smooth_l1": -0.3})
    assert not is_quadratic(linear_objective(theta, X, y), [tacit.l1()], {"l1": -0.3})
    assert is_quadratic(linear_objective(theta, X, y), [tacit.l2()], {"l2": -0.3})


def is_quadratic(objective, regularizers, strengths):
    function = PenalisedObjective(objective, penalty(regularizers, strengths))
    generator = torch.Generator().manual_seed(0)
    return curvature.is_quadratic(function, function.flatten(objective.params), generator)


def test_a_certificate_of_a_fit_includes_its_known_penalties():
    X, y = random_data(13)
    model = tanh_mlp(13)
    ridge, lasso = elastic_net()
    minimise(model, F.mse_loss, (X, y), {ridge: 2e-2, lasso: 1e-2})
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    fit = tacit.fit(tacit.endpoint_equations(objective, [lasso], known={ridge: 2e-2}))
    certificate = certify(objective, [ridge, lasso], fit)
    assert certificate.residual_norm < 1e-8
    with pytest.raises(tacit.InputError, match="no regularizer for l2"):
        certify(objective, [lasso], fit)


def test_a_layerwise_penalty_applies_each_strength_to_its_layer():
    params = {"a.weight": torch.tensor([1.0, 2.0]), "b.weight": torch.tensor([3.0])}
    value = penalty([tacit.layerwise(tacit.l2)], {"l2[a]": 1.0, "l2[b]": 10.0})(params)
    assert float(value) == pytest.approx(95)


def test_calls_that_cannot_be_certified_are_refused_with_the_reason():
    X, y = random_data(14)
    objective = linear_objective(torch.zeros(5, dtype=torch.float64), X, y)
    cases = [
        (objective, [tacit.l1()], {"l1": 0.1}, "kink"),
        (
            objective,
            [tacit.regularizers.gradient_norm(objective)],
            {"gradient_norm": 0.1},
            "only once",
        ),
        (objective, [tacit.l2()], {"l1": 0.1}, "no strength for l2"),
        (objective, [tacit.l2()], {"l2": float("nan")}, "finite number"),
        (objective, [tacit.l2()], 0.1, "dictionary"),
        (objective, [], {}, "at least one"),
        (objective.model, [tacit.l2()], {"l2": 0.1}, "tacit.Objective"),
    ]
    for argument, regularizers, strengths, words in cases:
        with pytest.raises(tacit.InputError, match=words):
            certify(argument, regularizers, strengths)


def test_wrong_shapes_of_least_squares_are_refused():
    X, y = random_data(15)
    eye = torch.eye(5)
    cases = [
        ((X[0], y, eye), None, "one row per example"),
        ((X, y[:9], eye), None, "one observation per row"),
        ((X, y, torch.ones(5)), None, "torch.diag"),
        ((X, y, eye), torch.ones(4), "one vector of 5"),
        ((X, y * torch.nan, eye), None, "y contains NaN"),
    ]
    for arguments, params, words in cases:
        with pytest.raises(tacit.InputError, match=words):
            certify_least_squares(*arguments, params=params)


def test_columns_of_unequal_scale_do_not_make_least_squares_singular():
    X, y = random_data(20, count=100, inputs=3)
    X = X * torch.tensor([2e6, 1.0, 1e-3]).double()
    certificate = certify_least_squares(X, y, torch.zeros(3, 3))
    assert certificate.verdict == "strongly convex"
    expected = torch.linalg.lstsq(X, y).solution[:, 0]
    torch.testing.assert_close(certificate.minimiser, expected, rtol=1e-6, atol=0)
    objective = linear_objective(expected, X, y)
    assert certify(objective, [tacit.l2()], {"l2": 0.0}).verdict == "strongly convex"


def test_a_large_column_does_not_hide_an_unbounded_problem():
    X, y = torch.diag(torch.tensor([1e4, 1.0])).double(), torch.tensor([1e5, 1.0]).double()
    assert certify_least_squares(X, y, torch.diag(torch.tensor([0.0, -0.5]))).verdict == "unbounded"


def test_a_loss_that_is_quadratic_only_nearby_is_not_called_quadratic():
    X, y = random_data(21, count=50, inputs=2)
    model = nn.Linear(2, 1, bias=False).double()
    objective = tacit.Objective(model, nn.HuberLoss(delta=100.0), (X, y))
    assert certify(objective, [tacit.l2()], {"l2": 0.1}).verdict != "strongly convex"
