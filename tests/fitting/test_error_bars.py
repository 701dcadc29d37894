"""Intervals of error bars, and error bars that are refused."""

import pytest
import torch

import tacit
from tacit.fitting.error_bars import ErrorBars

COVARIANCE = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))


def test_intervals_use_the_t_distribution_of_each_strength():
    bars = ErrorBars("draws", "8 groups", ("a", "b"), COVARIANCE, 2.0, (7.0, 2.0))
    intervals = bars.intervals({"a": 0.0, "b": 1.0})
    assert intervals["a"][1] == pytest.approx(2.3646243, rel=1e-7)  # tables of t
    assert intervals["b"] == pytest.approx((1 - 2 * 4.3026527, 1 + 2 * 4.3026527), rel=1e-7)
    normal = ErrorBars("draws", "8 groups", ("a", "b"), COVARIANCE)
    assert normal.quantile() == pytest.approx(1.9599640, rel=1e-7)


def test_wrong_levels_covariances_and_degrees_of_freedom_are_refused():
    bars = ErrorBars("draws", "8 groups", ("a", "b"), COVARIANCE)
    with pytest.raises(tacit.InputError, match=r"level is 95.*such as 0\.95"):
        bars.intervals({"a": 0.0, "b": 1.0}, 95)  # pyright: ignore[reportArgumentType]
    with pytest.raises(tacit.InputError, match=r"covariance of shape \(2, 2\) for 1 strengths"):
        ErrorBars("draws", "8 groups", ("a",), COVARIANCE)
    with pytest.raises(tacit.InputError, match="1 degrees of freedom for 2 strengths"):
        ErrorBars("draws", "8 groups", ("a", "b"), COVARIANCE, 1.0, (1.0,))
