"""Error bars that name their source of randomness."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tacit.errors import InputError

ErrorKind = Literal["sampling", "draws", "training", "steps", "layers"]
KINDS: dict[str, str] = {
    "sampling": "the choice of examples",
    "draws": "the technique's random draws",
    "training": "the noise of training",
    "steps": "the choice of steps",
    "layers": "the choice of layers",
}
"""The sources of randomness, the most informative first."""


@dataclass(frozen=True, eq=False)
class ErrorBars:
    """The covariance of the strengths under one source of randomness.

    A standard error answers "how different could this estimate have been?", and the answer depends
    on what is regarded as random: examples, draws, training noise, steps or layers. Each has its
    own standard error, and none contains another.
    """

    kind: ErrorKind
    basis: str
    """What they were computed from, in words: `8 groups of draws`."""
    names: tuple[str, ...]
    covariance: Tensor = field(repr=False)
    """In float64; infinite on the diagonal for undetermined strengths."""
    freedom: float = math.inf
    """Degrees of freedom of the t distribution for intervals; infinite for the normal."""
    freedoms: tuple[float, ...] = field(default=(), repr=False)
    """Degrees of freedom of every strength, if they differ; `freedom` is then the smallest."""
    measured: str = ""
    """How often 95 % intervals like these covered the truth in tests, if less than 90 %."""

    def __post_init__(self):
        count = len(self.names)
        if len(self.freedoms) not in (0, count):
            raise InputError(f"{len(self.freedoms)} degrees of freedom for {count} strengths.")
        if self.kind not in KINDS or self.covariance.shape != (count, count):
            raise InputError(
                f"error bars of kind {self.kind!r} with a covariance of shape "
                f"{tuple(self.covariance.shape)} for {count} strengths: pass one of "
                f"{', '.join(KINDS)} and one row and column per strength."
            )

    @property
    def standard_errors(self) -> dict[str, float]:
        """Standard errors by name; infinite for undetermined strengths."""
        return dict(zip(self.names, self.covariance.diagonal().sqrt().tolist(), strict=True))

    def intervals(
        self, strengths: Mapping[str, float], level: float = 0.95
    ) -> dict[str, tuple[float, float]]:
        """Two-sided intervals around the strengths."""
        freedoms = self.freedoms or (self.freedom,) * len(self.names)
        intervals = {}
        for (name, error), freedom in zip(self.standard_errors.items(), freedoms, strict=True):
            half_width = self.quantile(level, freedom) * error
            intervals[name] = strengths[name] - half_width, strengths[name] + half_width
        return intervals

    def quantile(self, level: float = 0.95, freedom: float | None = None) -> float:
        """Half the width of an interval of this level, in units of the standard error."""
        from scipy.special import ndtri, stdtrit

        if isinstance(level, bool) or not isinstance(level, float) or not 0 < level < 1:
            raise InputError(f"level is {level!r}: pass a number between 0 and 1, such as 0.95.")
        freedom, upper = self.freedom if freedom is None else freedom, (1 + level) / 2
        return float(ndtri(upper) if math.isinf(freedom) else stdtrit(freedom, upper))


def mark_undetermined(covariance: Tensor, inflation: Tensor) -> Tensor:
    """The covariance with infinite variances for strengths whose inflation is infinite."""
    undetermined = torch.isinf(inflation)
    covariance = covariance.clone()
    covariance[undetermined, :] = 0
    covariance[:, undetermined] = 0
    covariance[undetermined, undetermined] = math.inf
    return covariance
