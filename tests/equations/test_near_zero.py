"""Weights near zero under penalties with a kink at zero."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.regularizers import group_l2, nuclear_norm


def draws(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def linear_model(weight):
    model = nn.Linear(weight.shape[1], weight.shape[0], bias=False).double()
    model.weight.data = weight.clone()
    return model


def separate_weights(seed, strength, near_zero=0.0, count=40):
    """The lasso of Σ (θ_i − y_i)²/n, whose optimum is known; zeros are moved by `near_zero`."""
    draw = draws(seed)
    y = draw(count, 1)
    theta = y.sign() * (y.abs() - strength * count / 2).clamp_min(0)
    theta = torch.where(theta == 0, near_zero * draw(count, 1), theta)
    return linear_model(theta.T), (torch.eye(count).double(), y)


def subgradient_lasso(seed, strength=0.2, step=0.01, steps=1500, count=30):
    """Least squares with strength·‖θ‖₁, by steps along a subgradient; eight weights matter."""
    draw = draws(seed)
    X, truth = draw(100, count), torch.zeros(count, 1).double()
    truth[:8] = draw(8, 1)
    y = X @ truth + 0.3 * draw(100, 1)
    gram, moment, theta = 2 * X.T @ X / 100, 2 * X.T @ y / 100, 0.2 * draw(count, 1)
    for _ in range(steps):
        theta = theta - step * (gram @ theta - moment + strength * theta.sign())
    return linear_model(theta.T), (X, y)


def near_zero_problems(fit):
    return [problem for problem in fit.problems if "zero width" in problem.message]


@pytest.mark.parametrize("near_zero", [0.0, 1e-12])
def test_weights_that_are_zero_up_to_rounding_do_not_lower_the_strength(near_zero):
    model, data = separate_weights(0, 0.02, near_zero)
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.l1()])
    assert fit.strengths["l1"] == pytest.approx(0.02, rel=1e-9)  # was 0.0124 with 1e-12
    assert not fit.problems
    exact = tacit.estimate(model, F.mse_loss, data, [tacit.l1(zero_width=0)])
    wrong = exact.strengths["l1"] < 0.015
    assert wrong == bool(near_zero_problems(exact)) == (near_zero > 0)


@pytest.mark.parametrize("seed", range(100, 106))
def test_weights_that_oscillate_across_zero_are_counted_with_the_strength_without_them(seed):
    model, data = subgradient_lasso(seed)
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.l1()])
    assert fit.strengths["l1"] < 0.15
    assert "weak" not in {problem.kind for problem in fit.problems}  # "leave it out"
    (problem,) = near_zero_problems(fit)
    assert (problem.kind, problem.names) == ("unsettled", ("l1",))
    (source,) = fit.sources
    assert source.near_zero["l1"] == pytest.approx(0.2, rel=0.02)
    assert 10 <= source.near_zero_rows <= 25
    assert problem.message.startswith(f"{source.near_zero_rows} rows")
    wider = tacit.l1(zero_width=source.near_zero_width)
    again = tacit.estimate(model, F.mse_loss, data, [wider])
    assert again.strengths["l1"] == pytest.approx(source.near_zero["l1"], rel=1e-9)
    assert not again.problems


def test_the_count_is_stored_in_files(tmp_path):
    model, data = subgradient_lasso(1)
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.l1()])
    fit.equations.save(tmp_path / "equations.safetensors")
    loaded = tacit.fit(tacit.Equations.load(tmp_path / "equations.safetensors"))
    assert near_zero_problems(loaded) == near_zero_problems(fit) != []


def test_candidates_beside_l1_and_strengths_by_layer_are_counted_too():
    model, data = subgradient_lasso(1)
    fit = tacit.estimate(model, F.mse_loss, data, [tacit.layerwise(tacit.l1), tacit.l2()])
    (problem,) = near_zero_problems(fit)
    assert problem.names == (next(iter(fit.strengths)),)


def test_groups_near_zero_are_counted():
    draw = draws(0)
    y, strength, count = draw(12, 5), 0.04, 60
    size = y.norm(dim=1, keepdim=True)
    theta = y * (1 - strength * count / 2 / size).clamp_min(0)
    zero = (theta == 0).all(1)
    assert 0 < zero.sum() < 12
    theta[zero] = 1e-4 * draw(int(zero.sum()), 5)
    model, data = linear_model(theta), (torch.eye(5).double(), y.T)
    # mse_loss over 5 × 12 outputs: the gradient by θ_ij is 2 (θ_ij − y_ij) / 60.
    fit = tacit.estimate(model, F.mse_loss, data, [group_l2()])
    (problem,) = near_zero_problems(fit)
    assert fit.sources[0].near_zero["group_l2"] == pytest.approx(strength, rel=1e-6)
    assert fit.sources[0].near_zero_rows == 5 * int(zero.sum())
    assert fit.strengths["group_l2"] < 0.97 * strength
    assert problem.names == ("group_l2",)


def test_singular_values_near_zero_are_counted():
    draw = draws(0)
    y, strength = draw(6, 8), 0.06
    u, s, vh = torch.linalg.svd(y, full_matrices=False)
    shrunk = (s - strength * 24).clamp_min(0)
    assert 0 < int((shrunk == 0).sum()) < 6
    shrunk = torch.where(shrunk == 0, 1e-4 * draw(6).abs(), shrunk)
    model, data = linear_model(u @ torch.diag(shrunk) @ vh), (torch.eye(8).double(), y.T)
    fit = tacit.estimate(model, F.mse_loss, data, [nuclear_norm()])
    assert near_zero_problems(fit)
    assert fit.strengths["nuclear_norm"] < 0.97 * strength
    assert fit.sources[0].near_zero["nuclear_norm"] == pytest.approx(strength, rel=1e-6)


def test_small_weights_that_obey_the_law_are_no_zeros():
    draw = draws(3)
    theta = draw(1, 200) * 10 ** (-4 * torch.rand(1, 200, dtype=torch.float64))
    X, y = torch.eye(200).double(), (theta + 100 * 0.02 * theta.sign()).T
    fit = tacit.estimate(linear_model(theta), F.mse_loss, (X, y), [tacit.l1()])
    assert fit.strengths["l1"] == pytest.approx(0.02, rel=1e-9)
    assert not fit.problems


@pytest.mark.parametrize("seed", range(200, 210))
def test_an_unexplained_part_that_has_nothing_to_do_with_zeros_is_not_blamed_on_them(seed):
    draw = draws(seed)
    theta = draw(1, 200)
    y = (theta + 100 * (0.02 * theta.sign() + 0.01 * draw(1, 200))).T
    fit = tacit.estimate(
        linear_model(theta), F.mse_loss, (torch.eye(200).double(), y), [tacit.l1()]
    )
    assert fit.explained < 0.95
    assert not near_zero_problems(fit)
