"""Fits agree with the dense solution, also where columns are dependent."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import random_data, tanh_mlp
from support.scoring import strengths_of
from support.systems import SEEDS, equations, quick, random_system, reports
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import reference


@quick
@given(seed=SEEDS, blocks=st.integers(1, 5))
def test_full_rank_fits_equal_the_dense_oracle(seed, blocks):
    design, target = random_system(seed)
    fit = tacit.fit(equations(design, target, blocks=blocks))
    expected = reference.fit(design, target)
    torch.testing.assert_close(strengths_of(fit), expected, rtol=1e-8, atol=0)
    assert fit.explained == pytest.approx(reference.explained(design, expected, target), abs=1e-8)
    assert sum(fit.shares.values()) == pytest.approx(fit.explained, abs=1e-12)
    assert fit.residual_ratio**2 == pytest.approx(1 - fit.explained, abs=1e-8)
    assert fit.cosine**2 == pytest.approx(fit.explained, abs=1e-8)
    matching_loss = float((target - design @ expected).square().mean())  # Eq. 3: 1/p ‖∇R + ∇L‖²
    assert fit.matching_loss == pytest.approx(matching_loss, rel=1e-8)
    size = fit.residual_ratio * float(target.norm())
    assert fit.matching_loss == pytest.approx(size**2 / len(target), rel=1e-12)
    assert fit.to_dict()["matching_loss"] == fit.matching_loss


@quick
@given(seed=SEEDS, rank_loss=st.integers(1, 3))
def test_rank_deficient_fits_equal_the_dense_solution_of_least_norm(seed, rank_loss):
    design, target = random_system(seed, rank_loss=rank_loss)
    fit = tacit.fit(equations(design, target, blocks=3))
    expected = reference.fit(design, target)
    scale = float(expected.abs().max())
    torch.testing.assert_close(strengths_of(fit), expected, rtol=1e-8, atol=1e-8 * scale)
    assert fit.rank == design.shape[1] - min(rank_loss, design.shape[1] - 1)
    assert reports(fit, "dependent")


@quick
@given(seed=SEEDS)
def test_nonnegative_fits_equal_scipy_on_the_dense_system(seed):
    design, target = random_system(seed)
    fit = tacit.fit(equations(design, target, blocks=2), nonnegative=True)
    expected = reference.fit_nonnegative(design, target)
    torch.testing.assert_close(strengths_of(fit), expected, rtol=1e-8, atol=1e-10)
    assert fit.unconstrained is not None
    torch.testing.assert_close(
        strengths_of(fit.unconstrained), reference.fit(design, target), rtol=1e-8, atol=0
    )
    assert fit.explained == pytest.approx(reference.explained(design, expected, target), abs=1e-8)


def test_fewer_equations_than_strengths_are_underdetermined():
    X, y = random_data(0, inputs=4)
    model = nn.Linear(4, 1, bias=False).double()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.regularizers.symmetric()]))
    assert reports(fit, "underdetermined")
    assert (fit.rank, len(fit.strengths)) == (4, 10)
    # Least norm in the scaled basis is least Frobenius norm: Λθ = v has the symmetric solution
    # (vθᵀ + θvᵀ)/θᵀθ − θθᵀ(vᵀθ)/(θᵀθ)², and v = −∇L/2.
    theta = model.weight.detach()[0]
    v = -objective.gradient()["weight"][0] / 2
    size = theta @ theta
    outer = torch.outer(v, theta)
    expected = (outer + outer.T) / size - torch.outer(theta, theta) * (v @ theta) / size**2
    torch.testing.assert_close(fit.matrix(), expected, rtol=1e-10, atol=1e-12)


def test_a_diagonal_fit_solves_one_endpoint_exactly():
    X, y = random_data(1, inputs=4)
    model = nn.Linear(4, 1, bias=False).double()
    objective = tacit.Objective(model, F.mse_loss, (X, y))
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.regularizers.diagonal()]))
    expected = -objective.gradient()["weight"] / (2 * model.weight.detach())
    torch.testing.assert_close(fit.matrix(), torch.diag(expected[0]), rtol=1e-10, atol=0)
    assert fit.explained == pytest.approx(1)


def test_stacked_endpoints_recover_a_symmetric_matrix():
    generator = torch.Generator().manual_seed(3)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    truth = root @ root.T / 10
    parts = []
    for seed in range(4):
        X, y = random_data(seed + 10, inputs=4)
        n = len(X)
        theta = torch.linalg.solve(X.T @ X / n + truth, X.T @ y / n)
        model = nn.Linear(4, 1, bias=False).double()
        objective = tacit.Objective(model, F.mse_loss, (X, y))
        parts.append(
            tacit.endpoint_equations(
                objective, [tacit.regularizers.symmetric()], params={"weight": theta.T}
            )
        )
    fit = tacit.fit(tacit.stack(parts))
    torch.testing.assert_close(fit.matrix(), truth, rtol=1e-9, atol=1e-10)
    assert not fit.problems
    short_fit = tacit.fit(tacit.stack(parts[:3]))  # rank mp − m(m−1)/2 = 9 of 10
    assert short_fit.rank == 9
    assert reports(short_fit, "dependent")


def test_groups_of_draws_give_an_explained_fraction_without_their_noise():
    generator = torch.Generator().manual_seed(5)
    design = torch.randn(2000, 1, generator=generator, dtype=torch.float64)
    orthogonal = torch.randn(2000, generator=generator, dtype=torch.float64)
    orthogonal -= design[:, 0] * (design[:, 0] @ orthogonal) / (design[:, 0] @ design[:, 0])
    orthogonal *= design.norm() / orthogonal.norm()
    clean = design[:, 0] + orthogonal  # explained: one half
    corrected, naive = [], []
    for _ in range(200):
        noise = 1.5 * torch.randn(2000, 2, generator=generator, dtype=torch.float64)
        targets = clean[:, None] + noise
        corrected.append(tacit.fit(equations(design, targets)).explained)
        naive.append(tacit.fit(equations(design, targets.mean(1))).explained)
    error = torch.tensor(corrected).std() / 200**0.5
    assert abs(torch.tensor(corrected).mean() - 0.5) < 4 * error
    assert torch.tensor(naive).mean() < 0.4  # the noise of the draws counts as unexplained


def test_results_are_plain_and_can_be_written_as_json():
    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    fit = tacit.fit(
        tacit.endpoint_equations(objective, [tacit.l2(), tacit.l2(name="again")]), nonnegative=True
    )
    plain = json.loads(json.dumps(fit.to_dict(), allow_nan=False))
    assert plain["strengths"].keys() == {"l2", "again"}
    assert plain["condition"] is None  # infinite
    assert plain["unconstrained"]["problems"][0]["kind"] == "unexplained"
    assert all(type(value) is float for value in fit.strengths.values())


def test_new_error_bars_of_sampling_replace_the_old_ones_and_their_problem():
    objective = tacit.Objective(tanh_mlp(1), F.mse_loss, random_data(1, count=20))
    plain_fit = tacit.fit(tacit.endpoint_equations(objective, tacit.l2()))
    sample = tacit.score_examples(plain_fit)
    whole = tacit.score_examples(plain_fit, population=20.0)
    noisy_problem = tacit.Problem("noisy", "message", "remedy", ("l2",))
    noisy = plain_fit.with_error_bars(sample.error_bars(), noisy_problem)
    assert any(problem.kind == "noisy" for problem in noisy.problems)
    replaced = noisy.with_error_bars(whole.error_bars(), *whole.problems)
    assert not any(problem.kind == "noisy" for problem in replaced.problems)
    assert "nothing was sampled" in replaced.summary()
    assert json.dumps(replaced.to_dict(), allow_nan=False)


def test_problems_of_other_kinds_may_come_with_error_bars():
    objective = tacit.Objective(tanh_mlp(0), F.mse_loss, random_data(0))
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()]))
    bars = tacit.score_examples(fit).error_bars()
    with_bars = fit.with_error_bars(bars, tacit.Problem("of a user", "message", "remedy"))
    assert with_bars.problems[-1].kind == "of a user"


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e-120, 1.0, 1e120, 1e160, 1e300])
def test_penalties_and_losses_of_extreme_scale_are_fitted_right_or_refused(scale):
    X, y = random_data(4, count=40)
    model = torch.nn.Linear(5, 1, bias=False).double()
    normal = X.T @ X / 40 + 0.3 * torch.eye(5).double()
    model.weight.data = torch.linalg.solve(normal, X.T @ y / 40).T
    squares = tacit.regularizer("squares", lambda p: scale * p["weight"].square().sum())
    sizes = tacit.regularizer("sizes", lambda p: scale * p["weight"].abs().sum())
    if 1e-140 < scale < 1e140:
        fit = tacit.estimate(model, F.mse_loss, (X, y), [squares, sizes])
        assert fit.strengths["squares"] * scale == pytest.approx(0.3)
        assert not fit.problems
    else:
        with pytest.raises(tacit.InputError, match=r"the gradient of 'squares' .* constant"):
            tacit.estimate(model, F.mse_loss, (X, y), [squares, sizes])

    def loss(output, target):
        return scale * F.mse_loss(output, target)

    if scale > 1e140:
        with pytest.raises(tacit.InputError, match=r"the target .* constant"):
            tacit.estimate(model, loss, (X, y), [tacit.l2()])
        return
    fit = tacit.estimate(model, loss, (X, y), [tacit.l2()])
    assert fit.strengths["l2"] / scale == pytest.approx(0.3)
    assert [p.kind for p in fit.problems] == ["no signal"] * (scale < 1e-140)


def test_a_layer_whose_weights_have_vanished_has_no_column():
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 1)).double()
    model[1].weight.data.mul_(1e-150)
    model[1].bias.data.zero_()
    fit = tacit.estimate(model, F.mse_loss, random_data(4, count=40), [tacit.l2()])
    assert list(fit.layers) == ["0"]
