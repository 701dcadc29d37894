"""Reasons not to believe a fit, in words a reader can act on.

Thresholds are set so that good fits carry no Problem: an exact answer stays exact at a large
condition number, and a strength of nothing may come out a hair below zero.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tacit.errors import Problem
from tacit.evidence import Evidence
from tacit.params import shorten
from tacit.regularizers.quadratic import quadratic_matrix
from tacit.solving import System

SIGNAL = 10.0
"""Targets below this many times the rounding level are no signal."""
CLEAR = 0.95
"""… unless the fit explains this much: rounding over many rows follows no column."""
NOISE, NOISY = 0.5, 0.15
"""Parts of ‖target‖² that are draws' noise: above the first no signal, above the second noisy."""
EXPLAINED = 0.5
"""Fits that explain less than this are called unexplained."""
COLLAPSED = 0.99
"""|cosine| from which smooth-L1 and ridge columns count as one."""
CONDITION = 30.0
"""Condition number (of unit columns) from which columns may be collinear …"""
AMPLIFIED = 0.01
"""… and are so called if it amplifies the residual beyond this part of the target."""
MATERIAL = 1e-3
"""Contributions below this part of the target are too small to speak of."""
UNSETTLED = 0.5
"""Relative bend of a gradient within an epoch from which its weights count as not at rest."""
DRIFT = 0.1
"""Relative change of a strength over a trajectory that is called drifting."""


def diagnose(evidence: Evidence) -> tuple[Problem, ...]:
    """All problems of a fit, the gravest first; with no signal nothing else is worth saying."""
    silent = tuple(_no_signal(evidence))
    if silent:
        return (*silent, *_zeros(evidence))
    checks = (
        _noisy,
        _unexplained,
        _undetermined,
        _collapsed,
        _collinear,
        _vanishing,
        _unsettled,
        _faint,
        _negative,
        _indefinite,
        _drifting,
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


def _undetermined(e: Evidence) -> Iterator[Problem]:
    count = len(e.system.seen)
    if e.system.rank < count and e.equations.rows < count:
        yield Problem(
            "underdetermined",
            f"{e.equations.rows} equations for {count} strengths determine {e.system.rank} "
            "combinations of them; shown is the solution of least norm.",
            "Stack more endpoints (tacit.stack), or use a family of fewer coefficients.",
            e.equations.names,
        )


def _collapsed_pairs(e: Evidence) -> list[tuple[int, int]]:
    kinds = [family.kind for family in e.equations.families for _ in range(family.size)]
    ridge = [i for i, kind in enumerate(kinds) if kind == "l2"]
    lasso = [i for i, kind in enumerate(kinds) if kind == "smooth_l1"]
    cosines = e.system.cosines.abs()
    return [(i, j) for i in ridge for j in lasso if cosines[i, j] > COLLAPSED]


def _collapsed(e: Evidence) -> Iterator[Problem]:
    for i, j in _collapsed_pairs(e):
        ridge, lasso = e.equations.names[i], e.equations.names[j]
        yield Problem(
            "collapsed",
            f"The gradients of {ridge} and {lasso} have cosine "
            f"{float(e.system.cosines[i, j]):.4f}: nearly all weights are inside the smoothing "
            "width (or of one size), where the two penalties are the same.",
            "Their strengths are not identified apart: drop one, or lower beta.",
            (ridge, lasso),
        )


def _collinear(e: Evidence) -> Iterator[Problem]:
    lost = e.system.rank < len(e.system.seen)
    if not len(e.system.seen):
        return  # said by vanishing
    if lost and e.equations.rows < len(e.system.seen):
        return  # said by underdetermined
    amplified = e.system.condition > CONDITION and (
        e.system.condition * e.residual_ratio > AMPLIFIED
    )
    if not lost and not amplified:
        return
    pairs = {frozenset(pair) for pair in _collapsed_pairs(e)}
    for combination in e.system.weakest:
        members = torch.nonzero(combination.abs() > 0.1 * combination.abs().max())[:, 0]
        if frozenset(members.tolist()) in pairs:
            continue  # said by collapsed
        names = e.named(members)
        yield Problem(
            "collinear",
            f"The gradients of {shorten(names)} are linearly dependent: only combinations of "
            "their strengths are identified; shown is the solution of least norm."
            if lost
            else f"The gradients of {shorten(names)} nearly cancel (condition "
            f"{e.system.condition:.0f}): single strengths are unstable.",
            "Drop one of them, or stack endpoints whose weights differ.",
            names,
        )


def _vanishing(e: Evidence) -> Iterator[Problem]:
    names = e.named(e.system.norms == 0)
    if names:
        yield Problem(
            "vanishing",
            f"The gradient of {shorten(names)} is zero at these weights: its strength cannot be "
            "seen and is shown as 0.",
            "Leave it out, or stack a point where it is not at its minimum.",
            names,
        )


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


def _faint(e: Evidence) -> Iterator[Problem]:
    """Columns whose own part of the fit, apart from the others, is below what stays unexplained."""
    if len(e.system.seen) < 2 or e.residual_ratio < MATERIAL or e.explained < EXPLAINED:
        return  # nothing is left, or it is said by unexplained
    alone = e.contribution(e.strengths) / e.system.inflation.sqrt()
    known = {n for problem in (*_collapsed(e), *_collinear(e)) for n in problem.names}
    beside = e.residuals()
    faint = (alone < beside) & (alone > 0)
    faint &= ~torch.tensor([n in known for n in e.equations.names])
    faint &= ~torch.tensor(_of_matrices(e))
    for index in torch.nonzero(faint)[:, 0].tolist():
        name = e.equations.names[index]
        yield Problem(
            "faint",
            f"What {name} adds on its own is {float(alone[index]):.1%} of the target, less than "
            f"the {float(beside[index]):.1%} that stays unexplained in its rows: its strength is "
            "at the mercy of that, whatever the others' are.",
            "Lower what stays unexplained (train on, average an epoch's weights and add its drift, "
            "add candidates), or read the strength as an order of magnitude at best.",
            (name,),
        )


def _of_matrices(e: Evidence) -> list[bool]:
    """Which columns are entries of a matrix Λ, whose single values mean little."""
    kinds = [family.kind for family in e.equations.families for _ in range(family.size)]
    return [kind in ("diagonal", "symmetric") for kind in kinds]


def _negative(e: Evidence) -> Iterator[Problem]:
    free = e.strengths if e.free is None else e.free
    below = (free < 0) & (e.contribution(free) > MATERIAL) & ~torch.tensor(_of_matrices(e))
    names = e.named(below)
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


def _drifting(e: Evidence) -> Iterator[Problem]:
    """A trend of the strengths over the steps of a trajectory, against their scatter."""
    for number, source in enumerate(e.equations.sources):
        values = _by_step(e, number, source.steps) if source.steps >= 8 else None
        if values is None:
            continue
        time = torch.linspace(-0.5, 0.5, len(values), dtype=values.dtype)[:, None]
        mean, spread = values.mean(0), float(time.square().sum())
        trend = (time * values).sum(0) / spread
        scatter = (values - mean - time * trend).square().sum(0) / (len(values) - 2)
        clear = trend.abs() > 4 * (scatter / spread).sqrt()
        drifting = clear & (trend.abs() > DRIFT * mean.abs())
        drifting &= e.contribution(e.strengths) > MATERIAL
        for index in torch.nonzero(drifting)[:, 0].tolist():
            name = e.equations.names[index]
            first, last = (float(mean[index] + sign * trend[index] / 2) for sign in (-1, 1))
            yield Problem(
                "drifting",
                f"The strength of {name} moves from {first:.3g} to {last:.3g} over the trajectory: "
                "one number stands for none of it.",
                "Fit shorter pieces, or each step, and report how it changes.",
                (name,),
            )


def _by_step(e: Evidence, source: int, steps: int) -> Tensor | None:
    """The strengths of every step alone, or None where a step does not determine them."""
    found = []
    for step in range(steps):
        part = e.equations.step(source, step).factor()
        system = System(part[:, : len(e.strengths)])
        if system.rank < len(e.strengths):
            return None
        found.append(system.solve(part[:, len(e.strengths) :].mean(1, keepdim=True))[:, 0])
    return torch.stack(found)


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
