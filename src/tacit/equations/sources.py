"""What equations are of: their families of columns, and the facts about where they came from."""

from dataclasses import dataclass, field

from tacit.objective.scale import Scale
from tacit.regularizers.family import Shape


@dataclass(frozen=True)
class Family:
    """The adjacent columns that came from one regularizer, and its kind."""

    name: str
    kind: str
    size: int
    definition: str = ""
    """See `Regularizer.definition`."""
    shape: Shape | None = None
    """The knots, for a family whose strengths are a curve (all of its columns are here)."""
    bounded: tuple[bool, ...] = ()
    """Which strengths every fit keeps at zero or above; () for none."""

    def describe(self) -> str:
        """The name, with what distinguishes the family from others of that name."""
        text = f"{self.name!r} ({self.definition or self.kind or 'another penalty'}"
        if self.shape is not None:
            knots = self.shape.knots
            text += f", {len(knots)} knots from {knots[0]:.4g} to {knots[-1]:.4g}"
        return text + ")"


@dataclass(frozen=True, kw_only=True)
class PointFacts:
    """What was seen of a point while its target was computed; it tells when to doubt the target."""

    unsettled: dict[str, float] = field(default_factory=dict)
    """By penalty: ‖mean of ∇R over an epoch − ∇R at the mean point‖ / ‖mean of ∇R‖."""
    unreached: tuple[str, ...] = ()
    """Parameters that the loss does not reach (an unused head); they have no equations."""
    burn_in: float = 0.0
    """Norm of the part of the target that is due to an optimizer's averages, momentum or squared
    gradients, that were still settling."""
    clipped: float = 0.0
    """Part of the updates whose gradients look clipped."""
    dropout: bool = False
    """Whether dropout was active in training, but is neither in the objective nor, in equations, in
    what a candidate may stand for."""
    memory: float = 0.0
    """Steps over which momentum correlates the noise, 1/(1−β); 0 where it was taken out."""
    step_sizes: tuple[float, ...] = ()
    """Times of the steps, where they were compared with a flow (`rk4`)."""


@dataclass(frozen=True, kw_only=True)
class Source(PointFacts):
    """Where equations came from: the facts in the header of a summary."""

    mode: str
    """endpoint, difference, trajectory or accumulated."""
    loss: str
    examples: int
    parameters: int
    tensors: int
    frozen: int
    tied: int
    dtype: str
    gradient_norm: float
    parameter_norm: float
    loss_value: float | None = None
    steps: int = 1
    known: dict[str, float] = field(default_factory=dict)
    near_zero: dict[str, float] = field(default_factory=dict)
    """By penalty with a kink at zero: its strength without the weights that lie just outside of its
    zero width and have most of what is unexplained."""
    near_zero_rows: int = 0
    """How many rows those weights have."""
    near_zero_width: float = 0.0
    """The zero width that would have them inside."""
    unit: str = "examples"
    """What the mean is over: examples (or tokens), or batches whose examples interact."""
    ignored: float = 0.0
    """Part of the examples or tokens on which the loss does not depend: padding counted as data."""
    uneven: bool = False
    """Whether rows of one batch have more targets than those of another, and count the same."""
    epoch: bool = False
    """Whether these are the means over one epoch of a run."""
    sampled: bool = False
    """Whether these are the means over a part of an epoch, and its ∇L is of a sample of its own."""
    layer: str = ""
    """The layer that the equations were restricted to, if any."""
    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By family with knots, how many weights lie below the first, between each two, and above."""
    scale: Scale | None = None
    """The scale of the technique whose difference this is, if it has one."""
