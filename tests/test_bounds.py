"""Each bound holds in at least a fraction 1 − δ of simulated systems that meet its assumptions."""

import math

import pytest
import torch
from support.systems import equations

import tacit
from tacit import bounds

TRIALS, DELTA = 1000, 0.05


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def correlated_covariance(size, seed):
    """A covariance with five large eigenvalues, and its square root."""
    Q = torch.linalg.qr(normal(size, size, seed=seed)).Q
    eigenvalues = torch.ones(size, dtype=torch.float64)
    eigenvalues[:5] = 20
    return Q @ torch.diag(eigenvalues) @ Q.T, Q @ torch.diag(eigenvalues.sqrt()) @ Q.T


@pytest.mark.parametrize(("strengths", "seed"), [(1, 0), (3, 1), (8, 2)])
def test_the_linear_bound_holds_with_correlated_noise_and_bias(strengths, seed):
    p, sigma = 120, 0.7
    design = normal(p, strengths, seed=seed) * torch.logspace(0, -1, strengths).double()
    covariance, root = correlated_covariance(p, seed + 10)
    bias = 0.1 * normal(p, seed=seed + 20)
    truth = normal(strengths, seed=seed + 30)
    noise = sigma * normal(TRIALS, p, seed=seed + 40) @ root
    estimates = torch.linalg.lstsq(design, (design @ truth + bias + noise).T).solution.T
    kappa = bounds.conditioning(equations(design, noise[0]))
    assert kappa == pytest.approx(float(torch.linalg.eigvalsh(design.T @ design / p).min()))
    projected = torch.linalg.qr(design).Q.T @ bias
    bound = bounds.linear_bound(
        rows=p, strengths=strengths, conditioning=kappa, noise=sigma,
        correlation=bounds.correlation(design, covariance),
        bias=float(projected.norm()) / math.sqrt(p), delta=DELTA,
    )  # fmt: skip
    errors = (estimates - truth).norm(dim=1)
    assert float((errors > bound).double().mean()) <= DELTA
    assert float((errors > bound / 20).double().mean()) > DELTA  # it is not trivially large


def test_correlation_is_one_for_independent_noise():
    design = normal(50, 3, seed=5)
    assert bounds.correlation(design, torch.eye(50, dtype=torch.float64)) == pytest.approx(1)


def looseness(bound, errors):
    """The bound over the median error."""
    return bound / float(errors.median())


def test_at_ten_thousand_equations_the_linear_bound_is_within_twenty_times_the_error():
    p, strengths = 10_000, 2
    design = normal(p, strengths, seed=6)
    kappa = bounds.conditioning(equations(design, design[:, 0]))
    inverse = torch.linalg.pinv(design)
    errors = torch.stack([(inverse @ normal(p, seed=100 + i)).norm() for i in range(200)])
    bound = bounds.linear_bound(rows=p, strengths=strengths, conditioning=kappa, noise=1.0)
    assert 1 < looseness(bound, errors) < 20
    assert looseness(bound, errors) == pytest.approx(5.8, rel=0.1)  # as docs/guarantees.md says


def nearest_candidates(candidates, targets):
    """The index of the candidate nearest to each target."""
    return (targets[:, None] - candidates).square().sum(2).argmin(1)


def test_the_nonparametric_bound_holds_with_correlated_noise():
    p, count, sigma = 60, 40, 1.0
    candidates = 0.4 * normal(count, p, seed=7)
    truth = candidates[3] + 0.2 * normal(p, seed=8)
    covariance, root = correlated_covariance(p, 9)
    chosen = nearest_candidates(candidates, truth + sigma * normal(TRIALS, p, seed=10) @ root)
    distances = (candidates - truth).square().sum(1)
    excess = (distances[chosen] - distances.min()) / p
    differences = candidates[:, None] - candidates
    squares = differences.square().sum(2)
    variances = torch.einsum("abp,pq,abq->ab", differences, covariance, differences)
    inflation = variances / squares.clamp_min(1e-12)
    bound = bounds.nonparametric_bound(
        rows=p, candidates=count, diameter=float(squares.max().sqrt()), noise=sigma,
        correlation=float(inflation.max()), delta=DELTA,
    )  # fmt: skip
    assert float((excess > bound).double().mean()) <= DELTA
    assert float((excess > 0).double().mean()) > 0.2  # noise often selects a wrong candidate
    wrong = excess[excess > 0]
    assert looseness(bound, wrong) == pytest.approx(5.9, rel=0.1)  # as docs/guarantees.md says


def test_the_resolution_of_a_net_adds_to_the_bound():
    options = {"rows": 60, "candidates": 40, "diameter": 3.0, "noise": 1.0}
    coarse = bounds.nonparametric_bound(**options, resolution=0.5, approximation_error=2.0)
    assert coarse - bounds.nonparametric_bound(**options) == pytest.approx(
        (2 * 0.5 * 2 + 0.25) / 60
    )


def test_the_trajectory_bound_holds_along_a_martingale():
    """The scale of the noise depends on the past, so the increments are not independent."""
    steps, p, count = 30, 8, 12
    gradients = 0.1 * normal(count, steps, p, seed=11)  # ∇R at every step, for every candidate
    bias = gradients[0] + 0.05 * normal(steps, p, seed=12)
    signs = torch.randint(0, 2, (TRIALS, steps, p), generator=generator(13)).double() * 2 - 1
    scales = torch.ones(TRIALS, steps, 1, dtype=torch.float64)
    for t in range(1, steps):
        scales[:, t] = torch.where(signs[:, t - 1, :1] > 0, 1.0, 0.5)
    targets = bias + scales * signs
    observed = (targets[:, None] - gradients).square().sum((2, 3))
    predictable = (bias - gradients).square().sum((1, 2))
    excess = predictable[observed.argmin(1)] - predictable.min()
    differences = gradients - gradients[predictable.argmin()]
    covariances = [torch.eye(p, dtype=torch.float64)] * steps  # upper bounds, as scales are ≤ 1
    bound = bounds.trajectory_bound(
        variation=max(bounds.quadratic_variation(list(d), covariances) for d in differences),
        increment=float(differences.abs().sum(2).max()), candidates=count, delta=DELTA,
    )  # fmt: skip
    assert float((excess > bound).double().mean()) <= DELTA
    assert float((excess > 0).double().mean()) > 0.2  # noise often selects a wrong candidate
    wrong = excess[excess > 0]
    assert looseness(bound, wrong) == pytest.approx(5.0, rel=0.1)  # as docs/guarantees.md says


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 0), ("conditioning", -1.0), ("noise", math.nan), ("delta", 1.0), ("bias", "x")],
)
def test_wrong_numbers_are_refused_by_name(name, value):
    options = {"rows": 10, "strengths": 1, "conditioning": 1.0, "noise": 1.0, name: value}
    with pytest.raises(tacit.InputError, match=f"{name} is"):
        bounds.linear_bound(**options)
