"""Reasons not to believe a fit, in words a reader can act on.

Thresholds are set so that good fits carry no Problem: an exact answer stays exact at a large
condition number, and a strength of nothing may come out a hair below zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.equations import Equations
from tacit.errors import Problem
from tacit.params import shorten
from tacit.regularizers.quadratic import quadratic_matrix
from tacit.solving import System

SIGNAL = 10.0
"""Targets below this many times the rounding level are no signal."""
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
DRIFT = 0.1
"""Relative change of a strength over a trajectory that is called drifting."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a fit found, before it is judged."""

    equations: Equations
    system: System
    strengths: Tensor
    target: Tensor
    explained: float
    residual_ratio: float
    free: Tensor | None
    """Strengths of the free fit, beside a nonnegative one."""

    def contribution(self, strengths: Tensor) -> Tensor:
        """‖λ_k φ_k‖ / ‖target‖."""
        return strengths.abs() * self.system.norms / self.target.norm()

    def named(self, chosen: Tensor) -> tuple[str, ...]:
        """Names of the columns that a mask or list of indices chooses."""
        index = torch.nonzero(chosen)[:, 0] if chosen.dtype == torch.bool else chosen
        return tuple(self.equations.names[i] for i in index.tolist())


def diagnose(evidence: Evidence) -> tuple[Problem, ...]:
    """All problems of a fit, the gravest first; with no signal nothing else is worth saying."""
    silent = tuple(_no_signal(evidence))
    if silent:
        return (*silent, *_zeros(evidence))
    checks = (
        _unexplained,
        _undetermined,
        _collapsed,
        _collinear,
        _vanishing,
        _negative,
        _indefinite,
        _drifting,
        _zeros,
    )
    return tuple(problem for check in checks for problem in check(evidence))


def _no_signal(e: Evidence) -> Iterator[Problem]:
    length, floor = float(e.target.norm()), e.equations.floor
    if length <= SIGNAL * floor or length == 0:
        yield Problem(
            "no signal",
            f"The target's norm {length:.2g} is at the level of rounding ({floor:.2g}): there is "
            "nothing here to match, whatever was done in training.",
            "Evaluate in float64; with the training loss near zero, look at an earlier point or "
            "at the trajectory. It does not mean that there was no regularization.",
        )
    elif e.explained == 0 and e.equations.targets > 1:
        yield Problem(
            "no signal",
            "The groups of draws do not agree on any target: it is the noise of the draws.",
            "Pass more draws to the technique's objective.",
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


def _negative(e: Evidence) -> Iterator[Problem]:
    matrices = [
        family.kind in ("diagonal", "symmetric")
        for family in e.equations.families
        for _ in range(family.size)
    ]
    free = e.strengths if e.free is None else e.free
    below = (free < 0) & (e.contribution(free) > MATERIAL) & ~torch.tensor(matrices)
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
    """A trend of the strengths over the steps of one trajectory, against their scatter."""
    if len(e.equations.sources) != 1 or e.equations.sources[0].steps < 8:
        return
    steps = e.equations.sources[0].steps
    found = []
    for step in range(steps):
        part = e.equations.step(0, step).factor()
        system = System(part[:, : len(e.strengths)])
        if system.rank < len(e.strengths):
            return
        found.append(system.solve(part[:, len(e.strengths) :].mean(1, keepdim=True))[:, 0])
    values = torch.stack(found)
    time = torch.linspace(-0.5, 0.5, steps, dtype=values.dtype)[:, None]
    mean, spread = values.mean(0), float(time.square().sum())
    trend = (time * values).sum(0) / spread
    scatter = (values - mean - time * trend).square().sum(0) / (steps - 2)
    clear = trend.abs() > 4 * (scatter / spread).sqrt()
    drifting = clear & (trend.abs() > DRIFT * mean.abs())
    drifting &= e.contribution(e.strengths) > MATERIAL
    for index in torch.nonzero(drifting)[:, 0].tolist():
        first, last = (float(mean[index] + sign * trend[index] / 2) for sign in (-1, 1))
        yield Problem(
            "drifting",
            f"The strength of {e.equations.names[index]} moves from {first:.3g} to {last:.3g} over "
            "the trajectory: one number stands for none of it.",
            "Fit shorter pieces, or each step, and report how it changes.",
            (e.equations.names[index],),
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
