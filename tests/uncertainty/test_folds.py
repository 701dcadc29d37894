"""Products across folds: against dense ones, and for a population whose strength is known."""

from functools import partial

import pytest
import torch
from support.models import batch_norm_mlp, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective, reference
from tacit.regularizers import gradient_norm, hessian_trace, mean_of
from tacit.uncertainty import cross_fit


def half_squares(output, target):
    return (output - target).square().mean() / 2


@pytest.mark.parametrize("folds", [2, 5])
def test_strengths_are_those_of_dense_products_of_different_folds(folds):
    model, (X, y) = tanh_mlp(1), random_data(1)
    known = {tacit.l1(): 0.01}
    fit = cross_fit(
        model, F.mse_loss, (X, y), lambda o: [tacit.l2(), gradient_norm(o)], folds=folds, seed=3,
        known=known,
    )  # fmt: skip
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tensor_split(folds)
    Z = []
    for rows in order:
        objective = Objective(model, F.mse_loss, (X[rows], y[rows]))
        columns = [tacit.l2(), gradient_norm(objective)]
        gradient = reference.flat(objective.gradient())
        penalty = reference.flat(tacit.l1().gradient(objective.params)["l1"])
        design = reference.design(columns, {n: p.detach() for n, p in objective.params.items()})
        Z.append((design, -gradient - 0.01 * penalty))
    pairs = [(j, k) for j in range(folds) for k in range(folds) if j != k]
    gram = sum(Z[j][0].T @ Z[k][0] for j, k in pairs)
    right = sum(Z[j][0].T @ Z[k][1] for j, k in pairs)
    expected = torch.linalg.solve(gram, right).tolist()
    assert list(fit.strengths.values()) == pytest.approx(expected, rel=1e-8)
    assert ("sampling" in fit.error_bars) == (folds > 2)
    assert fit.sources[0].examples == 64
    gradient_norm_of_all = reference.flat(Objective(model, F.mse_loss, (X, y)).gradient()).norm()
    if folds == 2:  # of equal size
        corrected = fit.gradient_norm
        assert corrected == pytest.approx(float(gradient_norm_of_all), rel=0.1)


DIM, STRENGTH = 6, 0.3


def population():
    """A linear model at the optimum of E ½r² + 0.3·E[f²‖x‖²], for Gaussian inputs."""
    S = torch.diag(torch.tensor([1.0, 0.8, 1.2, 0.5, 1.5, 1.0]).double())
    beta = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.7, 0.3]).double()
    A = 2 * (S.trace() * S + 2 * S @ S)
    model = nn.Linear(DIM, 1, bias=False).double()
    model.weight.data = torch.linalg.solve(S + STRENGTH * A, S @ beta)[None]
    return model, S, beta


def sample(seed, S, beta, count=200):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(count, DIM, generator=generator, dtype=torch.float64) @ S.sqrt()
    noise = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return X, (X @ beta)[:, None] + 0.5 * noise


def penalty(model, batch):
    return model(batch[0])[:, 0].square() * batch[0].square().sum(1)


@pytest.mark.slow
def test_noise_of_columns_and_targets_does_not_bias_the_strength_of_the_population():
    model, S, beta = population()

    def candidates(objective):
        return mean_of(Objective.from_batch_loss(model, penalty, objective.data), name="R")

    estimates, covered, doubtful = [], 0, 0
    for seed in range(2000, 2014):
        fit = cross_fit(model, half_squares, sample(seed, S, beta), candidates, seed=seed)
        low, high = fit.intervals()["sampling"]["R"]
        covered += low < STRENGTH < high
        doubtful += bool(fit.problems)
        estimates.append(fit.strengths["R"] / STRENGTH)
    estimates = torch.tensor(estimates)
    assert abs(estimates.mean() - 1) < 3 * estimates.std() / len(estimates) ** 0.5
    assert covered >= 11
    assert doubtful <= 2


def test_columns_that_are_noise_are_named():
    model, S, beta = population()
    X, _ = sample(0, S, beta, count=40)
    y = torch.randn(40, 1, generator=torch.Generator().manual_seed(1)).double()
    model.weight.data.zero_()

    def candidates(objective):
        noise = Objective.from_batch_loss(
            model, lambda m, b: m(b[0])[:, 0] * torch.sign(b[1][:, 0]), objective.data
        )
        return mean_of(noise, name="noise")

    for seed in range(4):
        fit = cross_fit(model, half_squares, (X, y), candidates, seed=seed)
        assert fit.problems[0].kind == "noisy"
        assert "no more than noise" in str(fit.problems[0])


def test_wrong_calls_are_refused():
    model, data = tanh_mlp(1), random_data(1)
    fixed = gradient_norm(Objective(model, F.mse_loss, data))
    of_probes = partial(hessian_trace, probes=16)
    for call, words in (
        (lambda: cross_fit(model, F.mse_loss, data, fixed), "would keep the data"),
        (lambda: cross_fit(model, F.mse_loss, data, lambda _: fixed), "of an earlier call"),
        (lambda: cross_fit(model, F.mse_loss, data, tacit.l2), "cannot be called with an obj"),
        (lambda: cross_fit(model, F.mse_loss, data, of_probes), "from random probes"),
        (lambda: cross_fit(model, F.mse_loss, data, tacit.l2(), folds=1), "folds is 1"),
        (lambda: cross_fit(model, F.mse_loss, data, tacit.l2(), folds=40), "in 40 folds"),
        (lambda: cross_fit(model, F.mse_loss, [data], tacit.l2()), "data is a list"),
    ):
        with pytest.raises(InputError, match=words):
            call()


def test_models_with_batch_norm_take_its_options():
    model, (X, y) = batch_norm_mlp(1), random_data(1)
    model(X)
    with pytest.raises(InputError, match="batch norm"):
        cross_fit(model, F.mse_loss, (X, y), tacit.l2())
    fit = cross_fit(model, F.mse_loss, (X, y), tacit.l2(), folds=2, batch_norm="running")
    halves = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tensor_split(2)
    objectives = [
        Objective(model, F.mse_loss, (X[half], y[half]), batch_norm="running") for half in halves
    ]
    column = reference.flat({n: 2 * p.detach() for n, p in objectives[0].params.items()})
    target = -sum(reference.flat(o.gradient()) for o in objectives) / 2
    expected = float(column @ target / (column @ column))
    assert fit.strengths["l2"] == pytest.approx(expected, rel=1e-9)
    fit = cross_fit(
        model, F.mse_loss, (X, y), tacit.l2(), folds=4, batch_norm="batch", batch_size=8
    )
    assert (fit.sources[0].examples, fit.sources[0].unit) == (8, "batches")
