"""Strengths that change over time: a line through each, and whether its slope is significant."""

from dataclasses import dataclass

import torch
from torch import Tensor

DRIFT = 0.1
"""Smallest relative change of a strength, from first step to last, that is called drifting."""
CLEAR_TREND = 4.0
"""Smallest change in standard errors that is called drifting."""
MIN_STEPS = 8
"""Fewest steps from which a trend, or the scatter about it, can be estimated."""


@dataclass(frozen=True, eq=False)
class Trend:
    """A straight line over time through each column of values, one column per strength."""

    first: Tensor
    """The line at the first time."""
    last: Tensor
    """The line at the last time."""
    mean: Tensor
    error: Tensor
    """Standard error of last − first."""

    @property
    def change(self) -> Tensor:
        """The change of the line, last − first."""
        return self.last - self.first

    @property
    def drifting(self) -> Tensor:
        """Which changes are larger than their scatter explains, and large enough to matter."""
        clear = self.change.abs() > CLEAR_TREND * self.error
        return clear & (self.change.abs() > DRIFT * self.mean.abs())


def fit_trend(times: Tensor, values: Tensor, *, lags: int = 0) -> Trend:
    """Least-squares lines through values of shape (times, strengths).

    `lags` allows for scatter that is correlated over that many neighbours (Newey & West 1987). The
    standard error is never below that of independent scatter: with few steps it otherwise could be.
    """
    span = (times - times.mean())[:, None] / (times[-1] - times[0])
    spread = span.square().sum()
    mean, change = values.mean(0), (span * values).sum(0) / spread
    residual = values - mean - span * change
    independent = residual.square().sum(0) / (len(times) - 2) / spread
    moments = span * residual
    correlated = moments.square().sum(0)
    for lag in range(1, lags + 1):
        correlated += 2 * (1 - lag / (lags + 1)) * (moments[lag:] * moments[:-lag]).sum(0)
    correlated = correlated * len(times) / (len(times) - 2) / spread**2
    error = torch.maximum(independent, correlated).sqrt() if lags else independent.sqrt()
    return Trend(mean + span[0] * change, mean + span[-1] * change, mean, error)


def average_pieces(values: Tensor, memory: float) -> Tensor:
    """Means of values over pieces of twice the memory of their noise; the values without one.

    Momentum β correlates the noise of neighbouring steps by about β, over a memory of 1/(1−β)
    steps. Means over longer pieces are nearly independent. What does not fill a piece is left out
    at the beginning.
    """
    size = max(1, round(2 * memory))
    pieces = len(values) // size
    return values[len(values) - pieces * size :].reshape(pieces, size, *values.shape[1:]).mean(1)
