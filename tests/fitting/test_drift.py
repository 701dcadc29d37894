"""Straight lines through strengths over time, and strengths that drift along a trajectory."""

import numpy as np
import pytest
import torch
from support.models import params_of, random_data, tanh_mlp
from support.systems import draw, problem_kinds
from torch.nn import functional as F

import tacit
from tacit.fitting.drift import average_pieces, fit_trend


def uneven_times_and_values(count=12):
    times = torch.cumsum(draw(1, count).abs() + 0.1, 0)
    return times, draw(2, count, 3) + times[:, None] * torch.tensor([0.0, 1.0, -2.0])


def test_a_trend_equals_polyfit():
    times, values = uneven_times_and_values()
    trend = fit_trend(times, values)
    for column in range(values.shape[1]):
        coefficients, covariance = np.polyfit(times, values[:, column], 1, cov=True)
        first, last = np.polyval(coefficients, [times[0], times[-1]])
        assert float(trend.first[column]) == pytest.approx(first, rel=1e-10)
        assert float(trend.last[column]) == pytest.approx(last, rel=1e-10)
        assert float(trend.change[column]) == pytest.approx(last - first, rel=1e-10)
        error = float(times[-1] - times[0]) * covariance[0, 0] ** 0.5
        assert float(trend.error[column]) == pytest.approx(error, rel=1e-10)
    torch.testing.assert_close(trend.mean, values.mean(0))


def test_correlated_scatter_only_widens_the_error_of_a_trend():
    times, values = uneven_times_and_values()
    waves = values + 3 * torch.sin(times)[:, None]
    independent, correlated = fit_trend(times, waves), fit_trend(times, waves, lags=3)
    assert torch.equal(correlated.change, independent.change)
    assert (correlated.error >= independent.error).all()
    assert (correlated.error > independent.error).any()


def fit_of_descent(strengths):
    """A fit of exact descent on L + λ_t‖θ‖² with these λ_t."""
    model, data, step = tanh_mlp(8), random_data(8), 1e-2
    objective = tacit.Objective(model, F.mse_loss, data)
    point, points = params_of(model), []
    for strength in strengths:
        points.append(point)
        gradient = objective.gradient(point)
        point = {n: p - step * (gradient[n] + 2 * strength * p) for n, p in point.items()}
    trajectory = tacit.Trajectory.from_positions([*points, point], step)
    return tacit.fit(tacit.trajectory_equations(objective, trajectory, [tacit.l2()]))


def test_a_strength_that_changes_along_a_trajectory_is_drifting():
    fit = fit_of_descent([0.1 + 0.01 * t for t in range(12)])
    assert "drifting" in problem_kinds(fit)
    stacked = tacit.fit(tacit.stack([fit.equations, fit.equations]))
    assert "drifting" in problem_kinds(stacked)
    assert not fit_of_descent([0.1] * 12).problems
    alternating = [0.1 * (1 + 0.05 * (-1) ** t) for t in range(12)]
    assert "drifting" not in problem_kinds(fit_of_descent(alternating))


def test_pieces_are_means_over_twice_the_memory_of_the_noise():
    values = torch.arange(50.0, dtype=torch.float64)[:, None]
    assert torch.equal(average_pieces(values, 0.0), values)
    assert average_pieces(values, 10.0)[:, 0].tolist() == [19.5, 39.5]


def test_noise_with_the_memory_of_momentum_is_no_drift():
    """Of 200 runs of 200 steps with correlation 0.9, half drifted without an allowance."""
    noise = draw(9, 200, 400)
    for step in range(1, 400):
        noise[:, step] += 0.9 * noise[:, step - 1]
    values = 3 + noise[:, 200:].T
    drifting = {
        memory: float(fit_trend(torch.arange(float(len(p))), p).drifting.double().mean())
        for memory in (0.0, 10.0)
        for p in [average_pieces(values, memory)]
    }
    assert drifting[0.0] > 0.3
    assert drifting[10.0] < 0.05
