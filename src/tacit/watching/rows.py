"""A row of a watch: the equations of some windows of training, and their fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tacit.equations.equations import Equations
from tacit.fitting.fits import Fit, fit


@dataclass(frozen=True)
class WatchRow:
    """The strengths over some windows of training."""

    update: int
    """How many updates had been made at the end of the last one."""
    window: int
    """The number of that window (an epoch, or `steps` updates), from 1."""
    examples: int
    """On how many examples, or whole batches, ∇L was taken in all."""
    equations: Equations

    @cached_property
    def fit(self) -> Fit:
        """The fit, with error bars from the disagreement of the observed windows."""
        return fit(self.equations)

    def metrics(self, prefix: str = "tacit/") -> dict[str, float]:
        """The fit as flat numbers for a logger; see `Fit.to_metrics`."""
        return self.fit.to_metrics(prefix)

    def state_dict(self) -> dict[str, Any]:
        """The row as plain values and tensors."""
        plain = {"update": self.update, "window": self.window, "examples": self.examples}
        return plain | {"equations": self.equations.state_dict()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "WatchRow":
        """The row that `state_dict` was called on."""
        return cls(**{**state, "equations": Equations.from_state_dict(state["equations"])})
