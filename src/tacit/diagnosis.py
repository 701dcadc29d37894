"""Reasons not to believe a fit, in words a reader can act on.

Thresholds are set so that good fits carry no Problem: an exact answer stays exact at a large
condition number, and a strength of nothing may come out a hair below zero.
"""

from collections.abc import Iterator

import torch

from tacit.errors import Problem
from tacit.evidence import EXPLAINED, MATERIAL, Evidence
from tacit.params import shorten
from tacit.regularizers.quadratic import quadratic_matrix
from tacit.separation import by_chance, chance, collapsed, collinear, faint, undetermined, vanishing
from tacit.trend import drifting

SIGNAL = 10.0
"""Targets below this many times the rounding level are no signal."""
CLEAR = 0.95
"""… unless the fit explains this much: rounding over many rows follows no column."""
NOISE, NOISY = 0.5, 0.15
"""Parts of ‖target‖² that are draws' noise: above the first no signal, above the second noisy."""
UNSETTLED = 0.5
"""Relative bend of a gradient within an epoch from which its weights count as not at rest."""


def diagnose(evidence: Evidence) -> tuple[Problem, ...]:
    """All problems of a fit, the gravest first; with no signal nothing else is worth saying."""
    silent = tuple(_no_signal(evidence))
    if silent:
        return (*silent, *_zeros(evidence))
    checks = (
        _noisy,
        _unexplained,
        undetermined,
        collapsed,
        collinear,
        vanishing,
        _unsettled,
        chance,
        faint,
        _negative,
        _indefinite,
        drifting,
        _zeros,
    )
    return tuple(problem for check in checks for problem in check(evidence))


def _no_signal(e: Evidence) -> Iterator[Problem]:
    length, floor = float(e.target.norm()), e.equations.floor
    # Rounding has no direction: what a few columns explain in many rows is not rounding.
    if length == 0 or (length <= SIGNAL * floor and e.adjusted < CLEAR):
        yield Problem(
            "no signal",
            f"The target's norm {length:.2g} is at the level of rounding ({floor:.2g}), and these "
            "regularizers do not account for it: there is nothing here to match.",
            "Evaluate in float64; with the training loss near zero, look at an earlier point or "
            "at the trajectory. It does not mean that there was no regularization.",
        )
    elif e.noise > NOISE:
        yield Problem(
            "no signal",
            f"{min(e.noise, 1):.0%} of the target's squared norm is the noise of the draws: the "
            "groups do not agree on a target.",
            "Pass more draws to the technique's objective: the noise falls as one over their "
            "number.",
        )


def _noisy(e: Evidence) -> Iterator[Problem]:
    if e.noise > NOISY:
        yield Problem(
            "noisy",
            f"{e.noise:.0%} of the target's squared norm is the noise of the draws: strengths and "
            "shares are uncertain by as much.",
            "Pass more draws to the technique's objective, until it is below 5 %.",
            e.equations.names,
        )


def _unexplained(e: Evidence) -> Iterator[Problem]:
    if e.explained >= EXPLAINED:
        return
    trajectory = all(source.mode == "trajectory" for source in e.equations.sources)
    difference = all(source.mode == "difference" for source in e.equations.sources)
    message = f"These regularizers explain {max(e.explained, 0):.1%} of the target."
    if difference:
        remedy = "Another regularizer is at work: add candidates, or split them with layerwise()."
    elif trajectory:
        remedy = (
            "Either another regularizer is at work, or the steps carry noise (minibatches, kinks): "
            "add candidates, and average over steps or use the full batch to tell them apart."
        )
    else:
        remedy = (
            "Either another regularizer is at work, or training had not finished: one endpoint "
            "cannot tell. Add candidates; and train on, or polish L + R from here: what changes "
            "was unfinished training, what stays is a missing regularizer."
        )
    yield Problem("unexplained", message, remedy, e.equations.names)


def _unsettled(e: Evidence) -> Iterator[Problem]:
    """Gradients that bend within the noise of the weights, so that no point stands for an epoch."""
    worst: dict[str, float] = {}
    for source in e.equations.sources:
        for name, bend in source.unsettled.items():
            worst[name] = max(bend, worst.get(name, 0.0))
    for name, bend in worst.items():
        known = any(name in source.known for source in e.equations.sources)
        if bend > UNSETTLED and (known or name in e.equations.names):
            yield Problem(
                "unsettled",
                f"Over the epoch the mean gradient of {name} is {bend:.0%} of itself away from the "
                "gradient at the mean weights: they jump to and fro across its bend, and no single "
                "point is an optimum of L + R.",
                "The step is too large for this penalty: lower it, and train on. The strength that "
                "the steps applied may still be right.",
                (name,),
            )


def _negative(e: Evidence) -> Iterator[Problem]:
    free = e.strengths if e.free is None else e.free
    below = (free < 0) & (e.contribution(free) > MATERIAL) & ~torch.tensor(e.of_matrices)
    known = set(by_chance(e))  # the sign of what chance explains says nothing
    for problem in (*collapsed(e), *collinear(e)):  # nor do signs in a split of one sum
        own = [float(free[e.equations.names.index(name)]) for name in problem.names]
        known |= set(problem.names) if min(own) < 0 < max(own) else set()
    names = tuple(name for name in e.named(below) if name not in known)
    if not names:
        return
    values = ", ".join(f"{float(free[e.equations.names.index(n)]):.3g}" for n in names[:6])
    held = "is held at zero where the free fit has" if e.free is not None else "comes out as"
    yield Problem(
        "negative",
        f"The strength of {shorten(names)} {held} {values}: the weights are pushed up this "
        "penalty, not down.",
        "Such a penalty was not minimised here: another regularizer that is correlated with it is "
        "likely missing, or training was unfinished."
        + ("" if e.free is not None else " nonnegative=True gives the best fit without it."),
        names,
    )


def _indefinite(e: Evidence) -> Iterator[Problem]:
    for kind, coefficients in e.equations.matrices(e.strengths.tolist()):
        matrix = quadratic_matrix(torch.tensor(coefficients, dtype=torch.float64), kind)
        values = torch.linalg.eigvalsh(matrix)
        if values[0] < -MATERIAL * values.abs().max():
            yield Problem(
                "indefinite",
                f"The {kind} Λ has eigenvalues from {float(values[0]):.3g} to "
                f"{float(values[-1]):.3g}: θᵀΛθ is not a penalty in every direction.",
                "L + θᵀΛθ need not have a minimum: check that the Hessian of the sum is positive "
                "definite before retraining with it.",
            )


def _zeros(e: Evidence) -> Iterator[Problem]:
    gone = sum(block.left_out for block in e.equations.blocks)
    if gone:
        total = gone + e.equations.rows
        yield Problem(
            "zeros",
            f"{gone:,} of {total:,} rows lie at a kink of a regularizer (θ = 0 under l1): their "
            "condition is an inequality, so they are in no equation.",
            "Nothing to mend: the other rows carry the estimate.",
        )
