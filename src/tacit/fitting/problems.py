"""The table of problems: reasons not to believe a fit, the gravest first.

Each row is a test with what it says: `@row(kind, message, remedy, hides)` above a function that
yields the names of the strengths concerned and the numbers for the message. Its docstring says when
the problem is reported: `markdown_table` copies it, with the values of the thresholds, to
docs/reading-a-fit.md.

Two rows are also reported outside of `fit`, by their names here: `drifting` over checkpoints, and
`sampling_noise`, whose test needs the examples and is in `tacit.uncertainty.sampling`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.errors import Problem, ProblemKind
from tacit.fitting import drift, evidence
from tacit.fitting.error_bars import strengths_by_step
from tacit.fitting.evidence import Evidence
from tacit.fitting.explanations import better_scaled_by_time, describe_residual
from tacit.fitting.lack_of_fit import lacks_fit
from tacit.objective.params import shorten
from tacit.regularizers.quadratic import quadratic_matrix

Finding = tuple[tuple[str, ...], dict[str, Any]]
"""The names of the strengths that a problem concerns, and the numbers in its message."""
Test = Callable[[Evidence], Iterator[Finding]]


class Row(NamedTuple):
    """One row of the table of problems."""

    kind: ProblemKind
    message: str
    remedy: str
    hides: tuple[ProblemKind, ...]
    """Kinds that later rows do not report for the same strengths; for all, if it names none."""
    test: Test
    together: bool
    """Whether all strengths that the test finds are reported as one problem."""

    def report(self, names: tuple[str, ...] = (), **numbers: Any) -> Problem:
        """The problem, with the names and numbers of one fit."""
        message = self.message.format(shown=shorten(names), **numbers)
        return Problem(self.kind, message, self.remedy, names)


PROBLEMS: list[Row] = []
"""All rows, the gravest first."""


def row(
    kind: ProblemKind,
    message: str,
    remedy: str,
    hides: tuple[ProblemKind, ...] = (),
    *,
    together: bool = False,
) -> Callable[[Test], Row]:
    """Make a test the next row of the table; its name then refers to the row."""

    def add_row(test: Test) -> Row:
        PROBLEMS.append(Row(kind, message, remedy, hides, test, together))
        return PROBLEMS[-1]

    return add_row


def diagnose(e: Evidence) -> tuple[Problem, ...]:
    """All problems of a fit, the gravest first; each test is evaluated once."""
    reported: list[tuple[Row, Problem]] = []
    for row in PROBLEMS:
        hiding = [problem.names for by, problem in reported if row.kind in by.hides]
        if () in hiding:
            continue
        findings = [
            (names, numbers)
            for names, numbers in row.test(e)
            if not names or not any(set(names) <= set(others) for others in hiding)
        ]
        if row.together and findings:
            findings = [_join(findings)]
        reported += [(row, row.report(names, **numbers)) for names, numbers in findings]
    return tuple(problem for _, problem in reported)


def _join(findings: list[Finding]) -> Finding:
    """All findings as one: their names, and the first few of their numbers."""
    names = tuple(name for names, _ in findings for name in names)
    numbers = findings[0][1]
    return names, {key: shorten(f"{n[key]:.3g}" for _, n in findings) for key in numbers}


def markdown_table() -> str:
    """The table for the documentation, with the values of the thresholds."""
    lines = ["| kind | reported when | what to do |", "| --- | --- | --- |"]
    thresholds = vars(evidence) | vars(drift)
    for row in PROBLEMS:
        when = " ".join((row.test.__doc__ or "").split()).format_map(thresholds)
        lines.append(f"| {row.kind} | {when} | {row.remedy} |")
    return "\n".join(lines)


_REDUCE = (
    "reduce what is unexplained (add candidates; at an endpoint train on or average epochs; for a "
    "difference use more draws)"
)
_DROP = "Drop one of them, or stack endpoints whose weights differ."
_MISSING = (
    "Such a penalty was not minimised here: another regularizer that is correlated with it is "
    "probably missing, or training was unfinished."
)


@row(
    ProblemKind.NO_SIGNAL,
    "The target's norm {length:.2g} is at the level of rounding ({floor:.2g}), and these "
    "regularizers do not explain it: there is nothing to match.",
    "Evaluate in float64; if the training loss is near zero, use an earlier point or the "
    "trajectory. This does not mean that there was no regularization.",
    hides=tuple(ProblemKind),
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
    hides=tuple(ProblemKind),
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
    "The target's norm {length:.2g} is not far above rounding ({floor:.2g}): {shown} may be off by "
    "about {part:.0%} of the target.",
    "Evaluate in float64, with sums in float64 too (accumulate=).",
)
def _near_rounding(e: Evidence) -> Iterator[Finding]:
    """Rounding may change what a regularizer explains by more than {ROUNDED:.0%} of the target.

    This is its standard error if rounding is spread evenly over the equations.
    """
    floor = e.equations.floor
    if e.underdetermined or not e.target_norm:
        return
    parts = (e.system.inflation / e.equations.rows).sqrt() * floor / e.target_norm
    rounded = torch.nonzero((parts > evidence.ROUNDED) & parts.isfinite())[:, 0].tolist()
    if rounded:
        numbers = {"length": e.target_norm, "floor": floor, "part": float(parts[rounded].max())}
        yield _names(e, rounded), numbers


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
    ProblemKind.NOISY,
    "{noise:.0%} of the squared gradient of {shown}{beside} is noise of its random probes, by "
    "{groups} groups of them: its strength may be far too large or too small.",
    "Pass more probes, as in hessian_trace(objective, probes=128): the noise falls as one over "
    "their number. Columns that are exact, or less collinear with the others, help too.",
)
def _noisy_column(e: Evidence) -> Iterator[Finding]:
    """A column is from random probes, and more than {COLUMN_NOISE:.0%} of its square is noise.

    The square is that of the part which is orthogonal to the other columns. Or there are fewer than
    {FEWEST_GROUPS} probes, which do not measure their noise.
    """
    beside = " beside the others" if len(e.system.nonzero) > 1 else ""
    scatter = e.equations.scatter()
    groups = 0 if scatter is None else scatter.groups
    for column, noise in e.column_noise.items():
        if noise > evidence.COLUMN_NOISE or groups < evidence.FEWEST_GROUPS:
            numbers = {"noise": min(noise, 1.0), "beside": beside, "groups": groups}
            yield _names(e, [column]), numbers


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
    ProblemKind.OBJECTIVE,
    "The gradients look clipped in {part:.0%} of the updates: the steps did not follow the loss's "
    "gradient. Strengths of what is applied after clipping, such as weight decay, come out too "
    "large, by one over the factor of the clipping.",
    "Record without clipping, or where it no longer acts: with a larger max_norm or clip_value, or "
    "later in training. No single factor corrects it, because it differs between the updates.",
)
def _clipped(e: Evidence) -> Iterator[Finding]:
    """The gradients look clipped, by norm or by value, in more than {CLIPPED:.0%} of the updates.

    Their total norm, the norms of several tensors, or several entries reach the same largest size
    in three or more updates whose gradients differ otherwise.
    """
    sources = e.equations.sources
    part = sum(source.clipped for source in sources) / len(sources)
    if part > evidence.CLIPPED:
        yield e.equations.names, {"part": part}


@row(
    ProblemKind.OBJECTIVE,
    "Training had dropout, and the objective has none: what dropout adds is a part of the target, "
    "and the strengths of other penalties contain it.",
    "Make the objective with training=True and draws=8 or more, so that its loss is the one that "
    "training minimised. Or add a candidate for dropout, such as regularizers.dropout_moments.",
)
def _without_dropout(e: Evidence) -> Iterator[Finding]:
    """Dropout layers were active while epochs were recorded, the objective is evaluated without.

    And all candidates and known penalties are of the weights alone.
    """
    if any(source.dropout for source in e.equations.sources):
        yield e.equations.names, {}


def _unexplained(e: Evidence, *modes: str) -> Iterator[Finding]:
    in_use = {source.mode for source in e.equations.sources}
    only_mode = in_use.pop() if len(in_use) == 1 else "endpoint"
    if only_mode in modes and (e.explained < evidence.MIN_EXPLAINED or lacks_fit(e)):
        yield (
            e.equations.names,
            {"explained": max(e.explained, 0), "rest": describe_residual(e)},
        )


_LITTLE = "These regularizers explain {explained:.1%} of the target.{rest}"


@row(
    ProblemKind.UNEXPLAINED,
    _LITTLE,
    "Either another regularizer is at work, or training had not finished: one endpoint cannot "
    "separate the two. Add candidates; and train on, or minimise L + R from here: what changes was "
    "unfinished training, what stays is a missing regularizer.",
)
def _unexplained_endpoint(e: Evidence) -> Iterator[Finding]:
    """Less than {WELL_EXPLAINED:.0%} of the target is explained at an endpoint.

    Where batch norm's batches are drawn in groups, it must be more than their noise by a test at
    {LACK_OF_FIT:.0%}. The message says where the rest lies, and which other scope or family would
    explain it.
    """
    return _unexplained(e, "endpoint")


@row(
    ProblemKind.UNEXPLAINED,
    _LITTLE,
    "Another regularizer is at work: add candidates, or split them with layerwise().",
)
def _unexplained_difference(e: Evidence) -> Iterator[Finding]:
    """Less than {WELL_EXPLAINED:.0%} of a difference, or of an integral over a path, is explained.

    With groups of draws, it must be more than their noise by a test at {LACK_OF_FIT:.0%}, or more
    than {MIN_EXPLAINED:.0%}. The message is as for endpoints.
    """
    return _unexplained(e, "difference", "accumulated")


@row(
    ProblemKind.UNEXPLAINED,
    "These regularizers explain {explained:.1%} of the target; with a strength of {name} in "
    "proportion to the step size, which changes along the trajectory, it would be {part:.1%}.",
    "Pass scaled_by_time=[…] with that regularizer, or True for all: the strength is then per unit "
    "of time, such as ¼ for what finite steps add.",
)
def _changing_steps(e: Evidence) -> Iterator[Finding]:
    """Step sizes differ by {SAME_STEP:.0%} or more, and the strength of one regularizer with them.

    For trajectories that are compared with a flow, where less than {WELL_EXPLAINED:.0%} is
    explained, and a strength in proportion to the step size leaves less than half of the rest.
    """
    if (better := better_scaled_by_time(e)) is not None:
        name, part = better
        yield (name,), {"explained": max(e.explained, 0.0), "name": name, "part": part}


@row(
    ProblemKind.UNEXPLAINED,
    _LITTLE,
    "Either another regularizer is at work, or the steps carry noise (minibatches, kinks): add "
    "candidates, and average over steps or use the full batch to separate the two.",
)
def _unexplained_trajectory(e: Evidence) -> Iterator[Finding]:
    """Less than {MIN_EXPLAINED:.0%} of the target is explained along a trajectory.

    Or less than {WELL_EXPLAINED:.0%}, and epochs, or groups of steps, agree on another strength by
    a test at {LACK_OF_FIT:.0%}: one of another scope or family, or of one layer, that explains more
    than 1% beside the candidates. Where nothing measures noise (one epoch, fewer than 8 steps),
    less than {WELL_EXPLAINED:.0%} is enough.
    """
    return iter(()) if better_scaled_by_time(e) else _unexplained(e, "trajectory")


@row(
    ProblemKind.UNIDENTIFIED,
    "{rows} equations for {count} strengths determine only {rank} combinations of them; "
    "{which} is shown.",
    "Stack more endpoints (tacit.stack), or use a family with fewer coefficients.",
    hides=(ProblemKind.WEAK,),
)
def _underdetermined(e: Evidence) -> Iterator[Finding]:
    """There are fewer equations than strengths."""
    if e.underdetermined:
        names = _names(e, e.system.norms > 0)
        numbers = {"rows": e.equations.rows, "count": len(names), "rank": e.system.rank}
        yield names, {**numbers, "which": _which_solution(e)}


def _which_solution(e: Evidence) -> str:
    """Which of many solutions a fit shows: constraints may exclude the one of least norm."""
    return "one of the solutions" if e.nonnegative or e.psd else "the solution of least norm"


@row(
    ProblemKind.UNIDENTIFIED,
    "The gradients of {shown} have cosine {cosine:.4f}: nearly all weights are inside the "
    "smoothing width (or have the same size), where the two penalties are the same.",
    "Their strengths cannot be separated, unless the fit is exact for other reasons: drop one, or "
    "lower beta.",
    hides=(ProblemKind.UNIDENTIFIED, ProblemKind.WEAK),
)
def _collapsed(e: Evidence) -> Iterator[Finding]:
    """The gradients of a smooth-L1 and a ridge penalty are nearly the same.

    Their absolute cosine is above {COLLAPSED}, however small the residual is.
    """
    for pair in e.collapsed:
        yield _names(e, pair), {"cosine": float(e.system.cosines[pair])}


@row(
    ProblemKind.UNIDENTIFIED,
    "The gradients of {shown} are linearly dependent ({formula} = 0 in unit columns): only "
    "combinations of their strengths are identified; {which} is shown.",
    _DROP,
    hides=(ProblemKind.WEAK,),
)
def _dependent(e: Evidence) -> Iterator[Finding]:
    """Gradients are linearly dependent.

    The message has the combination of unit columns that cancels, as in 1.00·l2 − 1.00·copy = 0.
    """
    for columns, coefficients in e.dependent:
        formula = _formula(e, columns, coefficients)
        yield _names(e, columns), {"formula": formula, "which": _which_solution(e)}


@row(
    ProblemKind.UNIDENTIFIED,
    "The gradients of {shown} nearly cancel ({formula} ≈ 0 in unit columns; condition "
    "{condition:.0f}, variances inflated {inflation} times): their individual strengths are "
    "unstable.",
    _DROP,
    hides=(ProblemKind.WEAK,),
)
def _nearly_dependent(e: Evidence) -> Iterator[Finding]:
    """Gradients nearly cancel, which amplifies the residual.

    The condition number is above {MIN_CONDITION:.0f}, and condition number × `residual_ratio` is
    above {AMPLIFIED:.0%}.
    """
    for columns, coefficients in e.nearly_dependent:
        inflation = shorten(f"{value:.2g}" for value in e.system.inflation[columns].tolist())
        condition, formula = e.system.determined_condition, _formula(e, columns, coefficients)
        numbers = {"formula": formula, "condition": condition, "inflation": inflation}
        yield _names(e, columns), numbers


@row(
    ProblemKind.UNIDENTIFIED,
    "The gradient of {shown} is zero {where}: its strength cannot be estimated and is shown as 0.",
    "Leave it out, or stack a point where it is not at its minimum.",
    hides=(ProblemKind.WEAK,),
)
def _vanishing(e: Evidence) -> Iterator[Finding]:
    """The gradient of a regularizer is exactly zero at these weights, or where the loss reaches."""
    if len(e.system.nonzero) < len(e.strengths):
        unreached = dict.fromkeys(n for s in e.equations.sources for n in s.unreached)
        outside = f" that the loss reaches (not {shorten(unreached)})" if unreached else ""
        yield _names(e, e.system.norms == 0), {"where": f"at these weights{outside}"}


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
    "{rows:,} rows lie just outside the zero width of {shown}, up to {width:g} times the largest "
    "weight (or group, or matrix), and have most of what is unexplained: training kept them near "
    "zero without setting them to zero, so that their signs mean nothing. Without them the "
    "strength is {strengths}.",
    "Pass that width to the regularizer, as in l1(zero_width=0.01), or train on in smaller steps.",
    hides=(ProblemKind.WEAK, ProblemKind.NEGATIVE),
)
def _near_zero(e: Evidence) -> Iterator[Finding]:
    """Weights near zero, but outside the zero width of `l1`, have most of what is unexplained.

    So it is for groups and singular values. A larger zero width at least halves what is
    unexplained, more than leaving out as many other rows would, and the strength comes out larger.
    """
    sources = [s for s in e.equations.sources if not s.layer]
    source = max(sources, key=lambda s: s.near_zero_rows, default=None)
    names = tuple(n for n in source.near_zero if n in e.equations.names) if source else ()
    if source and names:
        strengths = shorten(f"{source.near_zero[n]:.3g}" for n in names)
        numbers = {"rows": source.near_zero_rows, "width": source.near_zero_width}
        yield names, {**numbers, "strengths": strengths}


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


_BY_CHANCE = (
    "What {shown} adds{beside} is no more than a random direction would add: one in its place adds "
    "as much with probability {probability:.2g}."
)


def _by_chance(e: Evidence) -> Iterator[Finding]:
    """Columns that a random direction would match, unless they and the residual are negligible."""
    beside = " beside the others" if len(e.system.nonzero) > 1 else ""
    sizes = e.contributions.tolist()
    for column, probability in e.chances.items():
        size = max(sizes[column], e.residual_ratio)
        if probability > evidence.MAX_CHANCE and size > evidence.NEGLIGIBLE:
            yield _names(e, [column]), {"beside": beside, "probability": probability}
    for columns, probability in e.family_chances.items():
        size = max(e.residual_ratio, *(sizes[column] for column in columns))
        if probability > evidence.MAX_CHANCE and size > evidence.NEGLIGIBLE:
            others = " beside the others" if len(columns) < len(sizes) else ""
            yield _names(e, columns), {"beside": others, "probability": probability}


@row(
    ProblemKind.WEAK,
    _BY_CHANCE,
    "Do not interpret its value or sign: leave it out. To test whether it was applied at all, "
    f"{_REDUCE}, or stack endpoints.",
    hides=(ProblemKind.WEAK, ProblemKind.NEGATIVE),
)
def _chance_in_residual(e: Evidence) -> Iterator[Finding]:
    """A random direction would add as much as the regularizer adds beside the others.

    It does so with a probability above {MAX_CHANCE:.0%}, and `residual_ratio` is above
    {NEGLIGIBLE:.1%}.
    """
    return _by_chance(e) if e.residual_ratio > evidence.NEGLIGIBLE else iter(())


@row(
    ProblemKind.WEAK,
    _BY_CHANCE,
    "There are hardly more equations than strengths, so that any columns would solve them: stack "
    "endpoints, or use fewer candidates.",
    hides=(ProblemKind.WEAK, ProblemKind.NEGATIVE),
)
def _chance_in_few_equations(e: Evidence) -> Iterator[Finding]:
    """A random direction would add as much, and nothing is left to explain.

    Its probability is above {MAX_CHANCE:.0%}, `residual_ratio` at most {NEGLIGIBLE:.1%}, and the
    regularizer's contribution above {NEGLIGIBLE:.1%} of the target.
    """
    return _by_chance(e) if e.residual_ratio <= evidence.NEGLIGIBLE else iter(())


@row(
    ProblemKind.WEAK,
    "What {shown} adds beyond the others is {unique:.1%} of the target, less than the "
    "{residual:.1%} that is unexplained in its rows: the unexplained part dominates its strength.",
    f"Read the strength as an order of magnitude at best, or {_REDUCE}.",
)
def _faint(e: Evidence) -> Iterator[Finding]:
    """What a regularizer adds beyond the others is less than what is unexplained in its rows.

    Two or more regularizers together explain at least {MIN_EXPLAINED:.0%}, and `residual_ratio` is
    at least {NEGLIGIBLE:.1%}.
    """
    residual = e.residual_ratio >= evidence.NEGLIGIBLE
    if len(e.system.nonzero) < 2 or e.explained < evidence.MIN_EXPLAINED or not residual:
        return
    if e.column_noise and not lacks_fit(e):  # the residual is noise, which has error bars
        return
    unique = e.contributions / e.system.inflation.sqrt()
    faint = (unique < e.residuals) & (unique > 0) & ~e.in_matrix
    for column in torch.nonzero(faint)[:, 0].tolist():
        numbers = {"unique": float(unique[column]), "residual": float(e.residuals[column])}
        yield _names(e, [column]), numbers


def negative_strengths(e: Evidence) -> Iterator[Finding]:
    """Strengths below zero that matter, unless they only cancel others."""
    strengths = e.unconstrained if e.nonnegative else e.strengths
    material = strengths.abs() * e.system.norms / e.target_norm > evidence.NEGLIGIBLE
    negative = (strengths < 0) & material & ~e.in_matrix
    combinations = [columns for columns, _ in (*e.dependent, *e.nearly_dependent)]
    for columns in [*map(list, e.collapsed), *combinations]:
        if strengths[columns].min() < 0 < strengths[columns].max():
            negative[columns] = False  # opposite signs of columns that cannot be separated
    for column in torch.nonzero(negative)[:, 0].tolist():
        yield _names(e, [column]), {"strengths": float(strengths[column])}


@row(
    ProblemKind.NEGATIVE,
    "The strength of {shown} comes out as {strengths}: a negative strength rewards a larger "
    "penalty.",
    f"{_MISSING} nonnegative=True gives the best fit without it.",
    together=True,
)
def _negative(e: Evidence) -> Iterator[Finding]:
    """A strength is below zero, and its contribution is above {NEGLIGIBLE:.1%} of the target.

    It is a finding instead (`Fit.findings`) where at least {CLEARLY_EXPLAINED:.0%} of a difference
    or of a trajectory's steps is explained: those say what was applied, of either sign.
    """
    return iter(()) if e.nonnegative or signs_are_findings(e) else negative_strengths(e)


def signs_are_findings(e: Evidence) -> bool:
    """Whether negative strengths of this fit are what the technique or the steps applied."""
    modes = {"epoch" if source.epoch else source.mode for source in e.equations.sources}
    return modes <= {"difference", "trajectory"} and e.explained >= evidence.CLEARLY_EXPLAINED


@row(
    ProblemKind.NEGATIVE,
    "The strength of {shown} is zero, where the unconstrained fit has {strengths}: a negative "
    "strength rewards a larger penalty.",
    _MISSING,
    together=True,
)
def _held_at_zero(e: Evidence) -> Iterator[Finding]:
    """λ ≥ 0 holds a strength at zero that would be negative, with a contribution as above."""
    return negative_strengths(e) if e.nonnegative else iter(())


@row(
    ProblemKind.NEGATIVE,
    "The {kind} Λ has eigenvalues from {smallest:.3g} to {largest:.3g}: θᵀΛθ is not a penalty in "
    "every direction.",
    "L + θᵀΛθ may have no minimum: check that the Hessian of the sum is positive definite before "
    "retraining with it.",
)
def _indefinite(e: Evidence) -> Iterator[Finding]:
    """Λ has an eigenvalue below −{NEGLIGIBLE:.1%} of its largest absolute eigenvalue."""
    for kind, smallest, largest in _indefinite_matrices(e, e.strengths):
        yield (), {"kind": kind, "smallest": smallest, "largest": largest}


@row(
    ProblemKind.NEGATIVE,
    "Λ ⪰ 0 costs {cost:.2%} of the target: the unconstrained Λ has eigenvalues from {smallest:.3g} "
    "to {largest:.3g}.",
    _MISSING,
)
def _held_semidefinite(e: Evidence) -> Iterator[Finding]:
    """Λ ⪰ 0 leaves {NEGLIGIBLE:.1%} of the target unexplained that an indefinite Λ explains."""
    if not e.psd or not e.target_norm:
        return
    # The unconstrained residual is orthogonal to the columns, so that squares add up.
    cost = float((e.system.design @ (e.unconstrained - e.strengths)).norm() / e.target_norm) ** 2
    if cost > evidence.NEGLIGIBLE:
        for _, smallest, largest in _indefinite_matrices(e, e.unconstrained):
            yield (), {"cost": cost, "smallest": smallest, "largest": largest}


@row(
    ProblemKind.UNIDENTIFIED,
    "There is no best Λ ⪰ 0: the fit improves the larger Λ is. The one shown is {times:.0f} times "
    "as large as the unconstrained one.",
    "Do not interpret Λ. Stack more endpoints, and compare with Fit.unconstrained.",
)
def _runaway(e: Evidence) -> Iterator[Finding]:
    """Λ ⪰ 0 is more than {RUNAWAY:.0f} times as large as the unconstrained Λ."""
    if e.psd and (free := float(e.unconstrained[e.in_matrix].norm())):
        times = float(e.strengths[e.in_matrix].norm()) / free
        if times > evidence.RUNAWAY:
            yield (), {"times": times}


def _indefinite_matrices(e: Evidence, strengths: Tensor) -> Iterator[tuple[str, float, float]]:
    """Kind, smallest and largest eigenvalue of every Λ with a negative eigenvalue that matters."""
    for kind, coefficients in e.equations.matrices(strengths.tolist()):
        matrix = quadratic_matrix(torch.tensor(coefficients, dtype=torch.float64), kind)
        eigenvalues = torch.linalg.eigvalsh(matrix)
        if eigenvalues[0] < -evidence.NEGLIGIBLE * eigenvalues.abs().max():
            yield kind, float(eigenvalues[0]), float(eigenvalues[-1])


@row(
    ProblemKind.DRIFTING,
    "The strength of {shown} moves from {first:.3g} to {last:.3g} over {period}: one number does "
    "not describe it.",
    "Fit shorter pieces, or each step, and report how it changes.",
)
def drifting(e: Evidence) -> Iterator[Finding]:
    """A strength changes by more than {DRIFT:.0%} and {CLEAR_TREND:.0f} standard errors.

    This is tested along trajectories of {MIN_STEPS} steps or more, and over the last checkpoints of
    a run by `identifiability.drift`, for contributions above {NEGLIGIBLE:.1%} of the target.
    """
    for number, source in enumerate(e.equations.sources):
        enough = source.steps >= drift.MIN_STEPS
        strengths = strengths_by_step(e.equations, number) if enough else None
        if strengths is not None:
            pieces = drift.average_pieces(strengths, source.memory)
            if len(pieces) < drift.MIN_STEPS:
                continue
            trend = drift.fit_trend(torch.arange(len(pieces), dtype=pieces.dtype), pieces)
            material = e.contributions > evidence.NEGLIGIBLE
            yield from trend_findings(e.equations.names, trend, material, "the trajectory")


def trend_findings(
    names: tuple[str, ...], trend: drift.Trend, material: Tensor, period: str
) -> Iterator[Finding]:
    """The strengths that drift over a period, of those whose contribution is material."""
    for column in torch.nonzero(trend.drifting & material)[:, 0].tolist():
        first, last = float(trend.first[column]), float(trend.last[column])
        yield (names[column],), {"first": first, "last": last, "period": period}


def _names(e: Evidence, columns: Sequence[int] | Tensor) -> tuple[str, ...]:
    """The names of columns, given by their indices or by a mask."""
    if isinstance(columns, Tensor):
        columns = torch.nonzero(columns)[:, 0].tolist()
    return tuple(e.equations.names[i] for i in columns)


def _formula(e: Evidence, columns: list[int], coefficients: list[float], most: int = 6) -> str:
    """A combination as text: `1.00·l2 − 0.98·smooth_l1`."""
    text = ""
    for name, value in list(zip(_names(e, columns), coefficients, strict=True))[:most]:
        size = f"{abs(value):.2f}" if abs(value) >= 0.01 else f"{abs(value):.1g}"
        text += f" {'−' if value < 0 else '+'} {size}·{name}"
    text = text.removeprefix(" + ").replace(" − ", "−", text.startswith(" −"))
    return text + (" + …" if len(columns) > most else "")
