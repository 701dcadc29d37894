"""What follows from scores: populations, clusters, the bootstrap, and the noise of the target."""

import time
from dataclasses import replace

import pytest
import torch
from support.models import random_data, tanh_mlp
from support.scoring import fit_and_score, strengths_of
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective, score_examples


@pytest.fixture(scope="module")
def scored_regression():
    """A fit of three strengths to 200 examples, and a function that scores them."""
    objective = Objective(tanh_mlp(4), F.mse_loss, random_data(4, count=200))
    regularizers = [tacit.l2(), tacit.smooth_l1(0.1), tacit.regularizers.group_l2(scope="*.weight")]
    fit, _ = fit_and_score(objective, regularizers)
    return fit, lambda **options: score_examples(fit, **options)


def test_a_finite_population_shrinks_errors_and_its_whole_has_none(scored_regression):
    fit, score = scored_regression
    infinite, half, whole = score(), score(population=400), score(population=200)
    torch.testing.assert_close(half.error_bars().covariance, infinite.error_bars().covariance / 2)
    assert half.error_bars().basis == "200 of 400 examples"
    assert half.noise_fraction == pytest.approx(infinite.noise_fraction / 2)
    assert not whole.error_bars().covariance.any()
    assert "nothing was sampled" in whole.error_bars().basis
    assert (whole.bootstrap(3) == strengths_of(fit)).all()
    assert score(population=400.0).population == 400
    assert score(population=float("inf")).population is None


def test_the_scores_of_a_cluster_are_added_up(scored_regression):
    _, score = scored_regression
    clustered = score(clusters=[f"patient {i // 4}" for i in range(200)])
    sums = score().values.view(50, 4, 3).sum(1)
    expected = sums.T @ sums * 50 / 49 / 200**2
    torch.testing.assert_close(clustered.error_bars().covariance, expected)
    assert clustered.error_bars().freedom == 49
    assert "50 clusters" in clustered.error_bars().basis


def test_the_bootstrap_has_the_covariance_of_the_error_bars(scored_regression):
    fit, score = scored_regression
    patients = [f"patient {i // 4}" for i in range(200)]
    for scores in (score(), score(population=400), score(clusters=patients)):
        replicates = scores.bootstrap(4000, seed=1)
        covariance = scores.error_bars().covariance
        assert ((replicates.T.cov() / covariance).diagonal() - 1).abs().max() < 0.12
        bias = (replicates.mean(0) - strengths_of(fit)).abs().max()
        assert bias < covariance.diagonal().sqrt().max() / 10
    assert torch.equal(score().bootstrap(20, seed=3), score().bootstrap(40, seed=3)[:20])


def test_the_bootstrap_is_fast(scored_regression):
    _, score = scored_regression
    large = replace(score(), values=torch.randn(10_000, 3).double())
    start = time.perf_counter()
    assert large.bootstrap().shape == (2000, 3)
    assert time.perf_counter() - start < 10  # about 0.2 s on an idle machine: see benchmarks


def test_examples_without_weight_count_as_not_drawn():
    model, (X, y) = tanh_mlp(1), random_data(1, count=60)
    weights = torch.zeros(60).double()
    weights[5:17] = 1
    weighted_objective = Objective(model, F.mse_loss, (X, y), weights=weights)
    _, weighted = fit_and_score(weighted_objective, tacit.l2(), population=60)
    part = Objective(model, F.mse_loss, (X[5:17], y[5:17]))
    _, unweighted = fit_and_score(part, tacit.l2(), population=60)
    assert weighted.error_bars().basis == unweighted.error_bars().basis == "12 of 60 examples"
    assert weighted.error_bars().freedom == 11
    assert weighted.error_bars().standard_errors == pytest.approx(
        unweighted.error_bars().standard_errors, rel=1e-9
    )


def test_a_single_example_with_weight_is_refused():
    one = torch.zeros(60).double()
    one[3] = 1
    objective = Objective(tanh_mlp(1), F.mse_loss, random_data(1, count=60), weights=one)
    with pytest.raises(InputError, match="one example has weight"):
        fit_and_score(objective, tacit.l2())


def test_a_noisy_target_is_reported_as_a_problem():
    objective = Objective(tanh_mlp(9), F.mse_loss, random_data(9, count=16))
    _, scores = fit_and_score(objective, [tacit.l2()])
    scores = replace(scores, covariance_trace=16 * 0.4 * scores.target_square_norm)
    (problem,) = scores.problems
    assert problem.kind == "noisy"
    assert "40%" in problem.message
    assert "60%" in problem.message
    assert "16 examples" in problem.message
    assert "population=" in problem.remedy
    assert scores.ceiling == pytest.approx(0.6)
    assert not replace(scores, covariance_trace=scores.covariance_trace / 4).problems
