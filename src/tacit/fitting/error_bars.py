"""Error bars that name their randomness: what would have had to fall differently."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tacit.errors import InputError

ErrorKind = Literal["sampling", "draws", "training", "steps", "layers"]
KINDS: dict[str, str] = {
    "sampling": "which examples were looked at",
    "draws": "the technique's random draws",
    "training": "the noise of training",
    "steps": "which steps were seen",
    "layers": "which layers are looked at",
}
"""The kinds of chance, the most telling first."""


@dataclass(frozen=True, eq=False)
class ErrorBars:
    """The covariance of the strengths under one kind of chance.

    A standard error answers "how else could this have come out?", and the answer depends on what
    could have been otherwise. There is no single one: examples, draws, training noise, steps and
    layers each give their own, and none contains another.
    """

    kind: ErrorKind
    basis: str
    """What they were made from, in words: `8 groups of draws`."""
    names: tuple[str, ...]
    covariance: Tensor = field(repr=False)
    """In float64, one row and column a strength; infinite on the diagonal where undetermined."""
    freedom: float = math.inf
    """Degrees of freedom of the t distribution that intervals use; infinite for the normal."""
    freedoms: tuple[float, ...] = field(default=(), repr=False)
    """The same for every strength, where they differ; `freedom` is then the least."""
    measured: str = ""
    """How often 95 % intervals like these were right in tests, where that was below 90 %."""

    def __post_init__(self):
        count = len(self.names)
        if len(self.freedoms) not in (0, count):
            raise InputError(f"{len(self.freedoms)} degrees of freedom for {count} strengths.")
        if self.kind not in KINDS or self.covariance.shape != (count, count):
            raise InputError(
                f"error bars of kind {self.kind!r} with a covariance of shape "
                f"{tuple(self.covariance.shape)} for {count} strengths: pass one of "
                f"{', '.join(KINDS)} and one row and column a strength."
            )

    @property
    def standard_errors(self) -> dict[str, float]:
        """Of every strength; infinite where it is not determined."""
        return dict(zip(self.names, self.covariance.diagonal().sqrt().tolist(), strict=True))

    def intervals(
        self, strengths: Mapping[str, float], level: float = 0.95
    ) -> dict[str, tuple[float, float]]:
        """Two-sided intervals around the strengths."""
        freedoms = self.freedoms or (self.freedom,) * len(self.names)
        found = {}
        for (name, error), freedom in zip(self.standard_errors.items(), freedoms, strict=True):
            reach = self.quantile(level, freedom) * error
            found[name] = strengths[name] - reach, strengths[name] + reach
        return found

    def quantile(self, level: float = 0.95, freedom: float | None = None) -> float:
        """How many standard errors an interval of this level reaches to either side."""
        from scipy.special import ndtri, stdtrit

        if isinstance(level, bool) or not isinstance(level, float) or not 0 < level < 1:
            raise InputError(f"level is {level!r}: pass a number between 0 and 1, such as 0.95.")
        freedom, above = self.freedom if freedom is None else freedom, (1 + level) / 2
        return float(ndtri(above) if math.isinf(freedom) else stdtrit(freedom, above))


def mark_undetermined(covariance: Tensor, inflation: Tensor) -> Tensor:
    """The covariance with infinite variances where the equations do not determine a strength."""
    lost = torch.isinf(inflation)
    covariance = covariance.clone()
    covariance[lost, :] = 0
    covariance[:, lost] = 0
    covariance[lost, lost] = math.inf
    return covariance
