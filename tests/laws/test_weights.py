"""Weight decay of factors is another penalty of their product."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tacit
from tacit.regularizers import power, schatten, spectral_norm


def draw(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def minimise(function, factors):
    """Minimise a function of factors by L-BFGS, to the last digits."""
    factors = [factor.requires_grad_() for factor in factors]
    optimizer = torch.optim.LBFGS(
        factors, max_iter=5000, tolerance_grad=1e-12, tolerance_change=0, history_size=50,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure():
        optimizer.zero_grad()
        value = function(*factors)
        value.backward()
        return value

    optimizer.step(closure)
    return [factor.detach() for factor in factors]


def linear(weight):
    """The product of the factors as the weight of a linear model."""
    model = nn.Linear(*weight.shape[::-1], bias=False).double()
    model.weight.data = weight
    return model


def decay(factors, strength):
    """What weight_decay=strength adds to the loss."""
    return strength / 2 * sum(factor.square().sum() for factor in factors)


@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize("count", [2, 3])
def test_decay_of_the_factors_of_a_matrix_is_a_schatten_penalty(count, seed):
    """W = W_n … W_1 with weight decay μ: strength nμ/2 of Σ σ_k^(2/n); for n = 2, μ Σ σ_k."""
    X, noise, left, right, *factors = draw(
        seed, (60, 7), (60, 5), (5, 2), (2, 7), (5, 4), (4, 4), (4, 7)
    )
    y, mu = X @ (left @ right).T + 0.3 * noise, 0.2
    factors = [0.7 * f for f in (factors if count == 3 else [factors[0], factors[2]])]
    factors = minimise(
        lambda *f: F.mse_loss(X @ torch.linalg.multi_dot(f).T, y) + decay(f, mu), factors
    )

    model = linear(torch.linalg.multi_dot(factors))
    fit = tacit.estimate(model, F.mse_loss, (X, y), schatten(p=2 / count, zero_width=1e-6))
    assert fit.rows == 2 * (5 + 7 - 2)  # the equations of a matrix of rank 2
    assert fit.strengths["schatten"] / (count * mu / 2) == pytest.approx(1, abs=1e-5)
    assert not fit.problems


@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize("count", [2, 3])
def test_decay_of_the_factors_of_every_weight_is_a_power_of_it(count, seed):
    """θ = u ⊙ v ⊙ … with weight decay μ: strength nμ/2 of Σ |θ_i|^(2/n); for n = 2, μ Σ |θ_i|."""
    X, truth, noise, *factors = draw(seed, (80, 12), (1, 12), (80, 1), *3 * [(1, 12)])
    y, mu = X @ (truth * (truth.abs() > 0.7)).T + 0.3 * noise, 0.1
    factors = [1 + 0.1 * f for f in factors[:count]]
    factors = minimise(
        lambda *f: F.mse_loss(X @ torch.stack(f).prod(0).T, y) + decay(f, mu), factors
    )

    model = linear(torch.stack(factors).prod(0))
    fit = tacit.estimate(model, F.mse_loss, (X, y), power(p=2 / count, zero_width=1e-6))
    assert fit.rows < 12  # some weights are zero
    assert fit.strengths["power"] / (count * mu / 2) == pytest.approx(1, abs=1e-5)
    assert not fit.problems


@pytest.mark.parametrize("seed", [10, 11])
def test_a_penalty_of_the_largest_singular_value_makes_them_equal_and_is_recovered(seed):
    """Under μ σ_1(W) the largest singular values become equal; the strength is μ all the same."""
    X, noise, truth = draw(seed, (60, 5), (60, 4), (4, 5))
    y, mu = X @ truth.T + 0.3 * noise, 0.8

    def proximal(W):
        """The minimiser of ½‖Z − W‖² + ημσ_1(Z): the largest singular values cut to one level."""
        u, s, vh = torch.linalg.svd(W, full_matrices=False)
        levels = (s.cumsum(0) - 0.5 * mu) / torch.arange(1, len(s) + 1)
        return u @ torch.diag(s.clamp(max=levels.max().clamp_min(0))) @ vh

    W = torch.zeros(4, 5).double()
    for _ in range(500):
        W = proximal(W - 0.5 * 2 / 4 * ((X @ W.T - y).T @ X) / 60)
    assert int((torch.linalg.svdvals(W) > 0.999 * torch.linalg.matrix_norm(W, 2)).sum()) > 1

    fit = tacit.estimate(linear(W), F.mse_loss, (X, y), spectral_norm())
    assert fit.strengths["spectral_norm"] / mu == pytest.approx(1, abs=1e-6)
    assert not fit.problems
