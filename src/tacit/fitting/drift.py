"""Strengths that move: trends over the steps of a trajectory, or over checkpoints."""

from dataclasses import dataclass

import torch
from torch import Tensor

DRIFT = 0.1
"""Relative change of a strength from its first step to its last that is called drifting …"""
CLEAR_TREND = 4.0
"""… if it is this many times its standard error."""
STEPS = 8
"""Steps from which a trend can be told from scatter."""


@dataclass(frozen=True, eq=False)
class Trend:
    """A straight line through each column of values over time: one column a strength."""

    first: Tensor
    """Where the line begins, at the first time."""
    last: Tensor
    """Where it ends, at the last."""
    mean: Tensor
    error: Tensor
    """Standard error of last − first."""

    @property
    def change(self) -> Tensor:
        """From first to last."""
        return self.last - self.first

    @property
    def drifting(self) -> Tensor:
        """Which changes are beyond their scatter and large enough to matter."""
        clear = self.change.abs() > CLEAR_TREND * self.error
        return clear & (self.change.abs() > DRIFT * self.mean.abs())


def trend(times: Tensor, values: Tensor, *, lags: int = 0) -> Trend:
    """Least-squares lines through values of shape (times, strengths).

    `lags` allows for scatter that is correlated over so many neighbours (Newey & West 1987); the
    standard error is never below the one of independent scatter, which few steps would let it be.
    """
    span = (times - times.mean())[:, None] / (times[-1] - times[0])
    spread = span.square().sum()
    mean, change = values.mean(0), (span * values).sum(0) / spread
    left = values - mean - span * change
    plain = left.square().sum(0) / (len(times) - 2) / spread
    moments = span * left
    joint = moments.square().sum(0)
    for lag in range(1, lags + 1):
        joint += 2 * (1 - lag / (lags + 1)) * (moments[lag:] * moments[:-lag]).sum(0)
    joint = joint * len(times) / (len(times) - 2) / spread**2
    error = torch.maximum(plain, joint).sqrt() if lags else plain.sqrt()
    return Trend(mean + span[0] * change, mean + span[-1] * change, mean, error)
