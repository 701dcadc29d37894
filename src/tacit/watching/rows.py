"""A row of a watch: the equations of some windows of training, and their fit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tacit.equations.epochs import EpochAverages
from tacit.equations.equations import Equations
from tacit.errors import Problem, ProblemKind
from tacit.fitting.fits import Fit, fit
from tacit.watching.step_errors import with_step_problem


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
    step_errors: Mapping[str, float] = field(default_factory=dict)
    """How far finite steps move the strengths, where that is clear (not where ∇L is of samples)."""

    @cached_property
    def fit(self) -> Fit:
        """The fit, with error bars from the disagreement of the observed windows.

        A Problem says where finite steps move a strength by more than that.
        """
        return with_step_problem(fit(self.equations), self.step_errors)

    def metrics(self, prefix: str = "tacit/") -> dict[str, float]:
        """The fit as flat numbers for a logger; see `Fit.to_metrics`."""
        return self.fit.to_metrics(prefix)

    def state_dict(self) -> dict[str, Any]:
        """The row as plain values and tensors."""
        plain = {name: value for name, value in vars(self).items() if name != "fit"}
        return plain | {"equations": self.equations.state_dict()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "WatchRow":
        """The row that `state_dict` was called on."""
        return cls(**{**state, "equations": Equations.from_state_dict(state["equations"])})


def find_obstacle(recorded: EpochAverages) -> Problem | None:
    """Why a window has no equations; None where it has."""
    if not recorded.is_finite():
        return Problem(
            ProblemKind.NO_SIGNAL,
            "Training has diverged: weights became NaN or infinite. Such windows have no "
            "equations.",
            "Go on from an earlier checkpoint, with a smaller step size or a wider dtype.",
        )
    if recorded.at_rest is not None:
        return Problem(
            ProblemKind.NO_SIGNAL,
            f"The learning rate of {recorded.at_rest!r} was zero for a whole window. Such windows "
            "have no equations.",
            "Set requires_grad=False for parameters that are not trained.",
        )
    return None
