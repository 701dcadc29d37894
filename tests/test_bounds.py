"""Each bound holds in at least 1 − δ of simulated systems that meet its assumptions."""

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


def correlated(size, seed):
    """A covariance with a few strong directions, and its square root."""
    q = torch.linalg.qr(normal(size, size, seed=seed)).Q
    values = torch.ones(size, dtype=torch.float64)
    values[:5] = 20
    return q @ torch.diag(values) @ q.T, q @ torch.diag(values.sqrt()) @ q.T


@pytest.mark.parametrize(("strengths", "seed"), [(1, 0), (3, 1), (8, 2)])
def test_the_linear_bound_holds_with_correlated_noise_and_bias(strengths, seed):
    p, sigma = 120, 0.7
    design = normal(p, strengths, seed=seed) * torch.logspace(0, -1, strengths).double()
    covariance, root = correlated(p, seed + 10)
    bias = 0.1 * normal(p, seed=seed + 20)
    truth = normal(strengths, seed=seed + 30)
    noise = sigma * normal(TRIALS, p, seed=seed + 40) @ root
    found = torch.linalg.lstsq(design, (design @ truth + bias + noise).T).solution.T
    kappa = bounds.conditioning(equations(design, noise[0]))
    assert kappa == pytest.approx(float(torch.linalg.eigvalsh(design.T @ design / p).min()))
    projected = torch.linalg.qr(design).Q.T @ bias
    bound = bounds.linear_bound(
        equations=p, strengths=strengths, conditioning=kappa, noise=sigma,
        correlation=bounds.correlation(design, covariance),
        bias=float(projected.norm()) / math.sqrt(p), delta=DELTA,
    )  # fmt: skip
    errors = (found - truth).norm(dim=1)
    assert float((errors > bound).double().mean()) <= DELTA
    assert float((errors > bound / 20).double().mean()) > DELTA  # it is no tautology


def test_without_correlation_the_inflation_is_one():
    design = normal(50, 3, seed=5)
    assert bounds.correlation(design, torch.eye(50, dtype=torch.float64)) == pytest.approx(1)


def looseness(bound, errors):
    return bound / float(errors.median())


def test_at_ten_thousand_equations_the_linear_bound_is_within_twenty_times_the_error():
    p, strengths = 10_000, 2
    design = normal(p, strengths, seed=6)
    kappa = bounds.conditioning(equations(design, design[:, 0]))
    inverse = torch.linalg.pinv(design)
    errors = torch.stack([(inverse @ normal(p, seed=100 + i)).norm() for i in range(200)])
    bound = bounds.linear_bound(equations=p, strengths=strengths, conditioning=kappa, noise=1.0)
    assert 1 < looseness(bound, errors) < 20
    assert looseness(bound, errors) == pytest.approx(5.8, rel=0.1)  # as docs/guarantees.md says


def match(candidates, targets):
    """The candidate nearest to each target, and squared distances to all."""
    return (targets[:, None] - candidates).square().sum(2).argmin(1)


def test_the_nonparametric_bound_holds():
    p, count, sigma = 60, 40, 1.0
    candidates = 0.4 * normal(count, p, seed=7)
    truth = candidates[3] + 0.2 * normal(p, seed=8)
    covariance, root = correlated(p, 9)
    chosen = match(candidates, truth + sigma * normal(TRIALS, p, seed=10) @ root)
    distances = (candidates - truth).square().sum(1)
    excess = (distances[chosen] - distances.min()) / p
    gaps = candidates[:, None] - candidates
    squares = gaps.square().sum(2)
    inflation = torch.einsum("abp,pq,abq->ab", gaps, covariance, gaps) / squares.clamp_min(1e-12)
    bound = bounds.nonparametric_bound(
        equations=p, candidates=count, diameter=float(squares.max().sqrt()), noise=sigma,
        correlation=float(inflation.max()), delta=DELTA,
    )  # fmt: skip
    assert float((excess > bound).double().mean()) <= DELTA
    assert float((excess > 0).double().mean()) > 0.2  # the noise does mislead
    assert bound / float(excess[excess > 0].median()) == pytest.approx(5.9, rel=0.1)  # as docs say


def test_a_net_pays_for_its_resolution():
    options = {"equations": 60, "candidates": 40, "diameter": 3.0, "noise": 1.0}
    coarse = bounds.nonparametric_bound(**options, resolution=0.5, best=2.0)
    assert coarse - bounds.nonparametric_bound(**options) == pytest.approx(
        (2 * 0.5 * 2 + 0.25) / 60
    )


def test_the_trajectory_bound_holds_along_a_martingale():
    """Noise whose size depends on the past, so that increments are no independent draws."""
    steps, p, count = 30, 8, 12
    slopes = 0.1 * normal(count, steps, p, seed=11)  # ∇R at every step, for every candidate
    bias = slopes[0] + 0.05 * normal(steps, p, seed=12)
    signs = torch.randint(0, 2, (TRIALS, steps, p), generator=generator(13)).double() * 2 - 1
    scales = torch.ones(TRIALS, steps, 1, dtype=torch.float64)
    for t in range(1, steps):
        scales[:, t] = torch.where(signs[:, t - 1, :1] > 0, 1.0, 0.5)
    targets = bias + scales * signs
    observed = (targets[:, None] - slopes).square().sum((2, 3))
    predictable = (bias - slopes).square().sum((1, 2))
    excess = predictable[observed.argmin(1)] - predictable.min()
    gaps = slopes - slopes[predictable.argmin()]
    steady = [torch.eye(p, dtype=torch.float64)] * steps
    bound = bounds.trajectory_bound(
        variation=max(bounds.quadratic_variation(list(gap), steady) for gap in gaps),
        increment=float(gaps.abs().sum(2).max()), candidates=count, delta=DELTA,
    )  # fmt: skip
    assert float((excess > bound).double().mean()) <= DELTA
    assert float((excess > 0).double().mean()) > 0.2  # the noise does mislead
    assert bound / float(excess[excess > 0].median()) == pytest.approx(5.0, rel=0.1)  # as docs say


@pytest.mark.parametrize(
    ("name", "value"),
    [("equations", 0), ("conditioning", -1.0), ("noise", math.nan), ("delta", 1.0), ("bias", "x")],
)
def test_bad_numbers_are_refused(name, value):
    options = {"equations": 10, "strengths": 1, "conditioning": 1.0, "noise": 1.0, name: value}
    with pytest.raises(tacit.InputError, match=f"{name} is"):
        bounds.linear_bound(**options)
