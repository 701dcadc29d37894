"""The rows of the table of problems about the target: how it was measured, and from what.

See `tacit.fitting.problems`, which has the rows about the strengths and the whole table.
"""

import math
from collections.abc import Iterator

from tacit.errors import ProblemKind
from tacit.fitting import evidence
from tacit.fitting.evidence import Evidence
from tacit.fitting.table import Finding, row
from tacit.objective.params import shorten

_ALL_BUT_KINKS = tuple(kind for kind in ProblemKind if kind is not ProblemKind.KINKS)


@row(
    ProblemKind.NO_SIGNAL,
    "The target's norm {length:.2g} is at the level of rounding ({floor:.2g}), and these "
    "regularizers do not explain it: there is nothing to match.",
    "Evaluate in float64; if the training loss is near zero, use an earlier point or the "
    "trajectory. This does not mean that there was no regularization.",
    _ALL_BUT_KINKS,
)
def _rounding(e: Evidence) -> Iterator[Finding]:
    """The target is at the level of rounding.

    Its norm is at most {MIN_SIGNAL:.0f} times its rounding level, and less than
    {CLEARLY_EXPLAINED:.0%} of it is explained beyond what as many arbitrary columns would explain.
    """
    floor = e.equations.floor
    # Rounding has no direction: what a few columns explain in many rows is not rounding.
    small = e.target_norm <= evidence.MIN_SIGNAL * floor and e.adjusted < evidence.CLEARLY_EXPLAINED
    if small or not e.target_norm:
        yield (), {"length": e.target_norm, "floor": floor}


@row(
    ProblemKind.NO_SIGNAL,
    "{noise:.0%} of the target's squared norm is noise of the draws: the groups of draws do not "
    "agree on a target.",
    "Pass more draws to the objective: the noise falls as one over their number.",
    _ALL_BUT_KINKS,
)
def _only_noise(e: Evidence) -> Iterator[Finding]:
    """More than {MAX_NOISE:.0%} of ‖target‖² is noise of the draws."""
    if e.noise > evidence.MAX_NOISE:
        yield (), {"noise": min(e.noise, 1.0)}


@row(
    ProblemKind.NOISY,
    "{noise:.0%} of the target's squared norm is noise of the draws: strengths and shares are "
    "uncertain by as much.",
    "Pass more draws to the objective, until it is below 5 %.",
)
def _noisy(e: Evidence) -> Iterator[Finding]:
    """More than {NOISY:.0%} of ‖target‖² is noise of the draws."""
    if e.noise > evidence.NOISY:
        yield e.equations.names, {"noise": e.noise}


@row(
    ProblemKind.NOISY,
    "About {noise:.0%} of the target's squared norm is sampling noise of these {count:,} examples: "
    "on other examples, no regularizer can explain more than about {ceiling:.0%}.",
    "Use more examples, or compare the explained fraction with this limit. If the model was "
    "trained on exactly these examples, nothing was sampled: pass their number as population=.",
)
def sampling_noise(_: Evidence) -> Iterator[Finding]:
    """More than {NOISY:.0%} of ‖target‖² is sampling noise (reported by `score_examples`)."""
    yield from ()  # a fit does not know its examples


@row(
    ProblemKind.OBJECTIVE,
    "The loss does not depend on {part:.0%} of the examples or tokens, but the mean counts them: "
    "padding was counted as data, and the strengths are too small by as much.",
    "Leave padding out: return the losses of the other tokens from Objective.from_batch_loss, or "
    "use Objective.from_mean_loss with their number. If training divided by all tokens, too, the "
    "strengths are right.",
)
def _padding(e: Evidence) -> Iterator[Finding]:
    """The loss of more than {IGNORED:.0%} of the examples or tokens depends on no output."""
    part = max(source.ignored for source in e.equations.sources)
    if part > evidence.IGNORED:
        yield e.equations.names, {"part": part}


@row(
    ProblemKind.OBJECTIVE,
    "Batches have different numbers of targets per row, and every row counts the same: the mean is "
    "not one over tokens.",
    "Say which mean training took: Objective.from_mean_loss(…, count=…) with the number of tokens, "
    "or of rows, of a batch. In batches with time before examples a row is a time step.",
)
def _uneven(e: Evidence) -> Iterator[Finding]:
    """The rows of one batch have more targets than those of another.

    So it is with sequences of different lengths, or with time before examples in the shapes.
    """
    if any(source.uneven for source in e.equations.sources):
        yield e.equations.names, {}


@row(
    ProblemKind.UNSETTLED,
    "Over the epoch the mean gradient of {shown} differs from the gradient at the mean weights by "
    "{change:.0%} of its norm: the weights oscillate across the kink, and no single point is an "
    "optimum of L + R.",
    "The step size is too large for this penalty: lower it, and train on. The strength that the "
    "steps applied may still be right.",
)
def _unsettled(e: Evidence) -> Iterator[Finding]:
    """A penalty's mean gradient over an epoch is not the gradient at the mean weights.

    They differ by more than {UNSETTLED:.0%} of its norm.
    """
    largest: dict[str, float] = {}
    for source in e.equations.sources:
        for name, change in source.unsettled.items():
            largest[name] = max(change, largest.get(name, 0.0))
    known = {name for source in e.equations.sources for name in source.known}
    for name, change in largest.items():
        if change > evidence.UNSETTLED and name in {*e.equations.names, *known}:
            yield (name,), {"change": change}


@row(
    ProblemKind.UNSETTLED,
    "The optimizer's running averages were still settling while steps were recorded (a momentum "
    "buffer that was empty at first, or Adam's squared gradients), so that their flow time or "
    "metric is not right: this alone makes up to {share:.0%} of the target's norm.",
    "Record later: skip the first 5/(1−β) updates of SGD with momentum β (50 for β = 0.9), and for "
    "Adam the epochs in which the loss still falls fast.",
)
def _burn_in(e: Evidence) -> Iterator[Finding]:
    """A momentum buffer was still filling while steps were recorded, or Adam's metric changing.

    The part of the target that this causes is above {BURN_IN:.0%} of its norm.
    """
    burn_in = math.hypot(*(source.burn_in for source in e.equations.sources))
    if burn_in > evidence.BURN_IN * e.target_norm:
        yield e.equations.names, {"share": min(burn_in / e.target_norm, 1.0)}


@row(
    ProblemKind.UNSETTLED,
    "Norm layers rescale the weights of {layers}, and their step size was still {step:.0%} of the "
    "largest in the averaged epochs: at a constant step size the noise of the steps lengthens such "
    "weights as fast as a penalty shortens them, and strengths come out far too small.",
    "Average epochs at the end of a schedule that lowers the step size to 0, such as a cosine; "
    "call average_epochs before training, so that it sees the whole schedule.",
)
def _normalised(e: Evidence) -> Iterator[Finding]:
    """The step size stayed large over averaged epochs, and norm layers rescale weights.

    In some epoch it never fell to {LARGE_STEP:.0%} of the largest step size of the run. Weights are
    rescaled by a norm layer if the loss does not depend on their length, ⟨θ, ∇L⟩ = 0.
    """
    steps: dict[str, float] = {}
    for source in e.equations.sources:
        for layer, step in source.normalised.items():
            if step > evidence.LARGE_STEP and layer in e.equations.layers:
                steps[layer] = max(step, steps.get(layer, 0.0))
    if steps:
        yield e.equations.names, {"layers": shorten(steps), "step": max(steps.values())}


@row(
    ProblemKind.KINKS,
    "{left_out:,} of {total:,} rows lie at a kink of a regularizer (θ = 0 under l1): their "
    "condition is an inequality, so they are in no equation.",
    "No action is needed: the other rows carry the estimate.",
)
def _kinks(e: Evidence) -> Iterator[Finding]:
    """Rows at a kink were left out (θ = 0 under `l1`, a zero group, a rank-deficient matrix)."""
    if left_out := sum(block.left_out for block in e.equations.blocks):
        yield (), {"left_out": left_out, "total": left_out + e.equations.rows}
