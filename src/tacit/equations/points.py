"""What is to be explained at single points, and what it was computed from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tacit.equations.candidates import Averaged
from tacit.equations.sources import PointFacts
from tacit.errors import InputError
from tacit.objective.objective import Objective
from tacit.objective.params import Params, fingerprint
from tacit.objective.ranks import ALONE, Ranks
from tacit.objective.scale import Scale
from tacit.regularizers.family import Regularizer

Mode = Literal["endpoint", "difference", "trajectory", "accumulated"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, eq=False)
class Setting:
    """What a target was computed from."""

    mode: Mode
    computed_from: Objective | None
    """The objective; the technique, for a difference. None for a target from a file."""
    plain: Objective | None = None
    """The objective without the technique, for a difference."""
    groups: int = 1
    """Groups of draws, each with a target of its own."""
    epochs: bool = False
    """Whether every point is an epoch of a run, and a source of its own."""
    sampled: bool = False
    """Whether ∇L of every epoch is that of a sample of its own."""
    piece: int = 0
    """Number of successive points with independent noise and nearly the same target, over which
    `Equations.means` are written; 0 for none."""
    every: int = 1
    """One of so many points has equations with other families (`Equations.alternatives`)."""
    diagnosed: bool = True
    """Whether equations have what problems of a fit name: other families, and weights near zero.
    Both take longer than the equations, and tests of many candidates do not need them."""
    followed: Mapping[Regularizer, float] | None = None
    """Known penalties that the reference of a trajectory followed, which are in the target; None
    where known penalties are subtracted from it."""
    follow: Callable[[Mapping[Regularizer, float]], "Iterable[TargetPoint]"] | None = None
    """The points of the target, computed again with a reference that follows these penalties."""
    in_file: Mapping[str, float] | None = None
    """For a target from a file: the known penalties that its reference followed, by name."""
    scale_in_file: Scale | None = None
    """For a target from a file: see `scale`."""

    @property
    def objective(self) -> Objective:
        """The objective that it was computed from; refused for a target from a file."""
        if self.computed_from is None:
            raise InputError("a target from a file has no objective: compute the target again.")
        return self.computed_from

    @property
    def ranks(self) -> Ranks:
        """The processes that share the parameters; only this one for a target from a file."""
        return ALONE if self.computed_from is None else self.computed_from.ranks

    @property
    def scale(self) -> Scale | None:
        """The scale of a technique, of the difference from the objective it was applied to."""
        if self.computed_from is None:
            return self.scale_in_file
        applied = self.plain is not None and self.objective.base is self.plain
        return self.objective.scale if applied else None

    @property
    def in_target(self) -> dict[str, float] | None:
        """Known penalties that are in the target, by name; None where none can be."""
        if self.followed is None:
            return None if self.in_file is None else dict(self.in_file)
        return {r.name: float(strength) for r, strength in self.followed.items()}

    def describe(self, point: "TargetPoint") -> Mapping[str, Any]:
        """Facts about the model, the loss and the data at a point."""
        return point.description or self.objective.describe(point.params)


@dataclass(frozen=True, eq=False)
class TargetPoint:
    """The target at one point: one vector per group of draws, with its facts."""

    params: Params
    vectors: Sequence[Params]
    """In float64, or in the dtype that the objective sums gradients in."""
    floors: Mapping[str, float]
    """Norm, by tensor, of a vector that would be only rounding."""
    gradient_norm: float
    loss_value: float | None = None
    averaged: Averaged = field(default_factory=dict)
    facts: PointFacts = field(default_factory=PointFacts)
    metric: Params = field(default_factory=dict)
    """The optimizer's metric at that time, √v̂ + ε of Adam; empty where it is not known."""
    time: float = 0.0
    """The time of the step, for a trajectory."""
    weights: Params = field(default_factory=dict)
    """By parameter, what the rows of its equations are multiplied by; empty for one."""
    start: Params | None = None
    """The point whose columns are subtracted, for an integral over a path."""
    description: Mapping[str, Any] = field(default_factory=dict)
    """What `Objective.describe` said of it, for a target from a file or of a sample."""
    fingerprint: tuple[float, ...] = ()
    """Of the parameters when the target was computed; they may be the model's live weights."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", self.fingerprint or fingerprint(self.params))

    @property
    def binding(self) -> dict[str, Any]:
        """What `Candidates.bind` needs of a point beside its parameters."""
        at = {n: getattr(self, n) for n in ("averaged", "metric", "time", "weights", "start")}
        return {**at, "unreached": self.facts.unreached}

    def check_unchanged(self) -> None:
        """Refuse parameters that have changed since the target was computed."""
        if fingerprint(self.params) != self.fingerprint:
            raise InputError(
                "the weights have changed since the target was computed: write the equations again "
                "(with params={n: p.detach().clone() for n, p in model.named_parameters()} to "
                "train the model on meanwhile)."
            )
