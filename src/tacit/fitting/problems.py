"""Reasons not to believe a fit, in words a reader can act on.

Thresholds are set so that good fits carry no Problem: an exact answer stays exact at a large
condition number, and a strength of nothing may come out a hair below zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.errors import Problem
from tacit.fitting.chance import chances
from tacit.fitting.drift import STEPS, Trend, trend
from tacit.fitting.solving import System
from tacit.objective.params import shorten
from tacit.regularizers.quadratic import quadratic_matrix

EXPLAINED = 0.5
"""Fits that explain less than this are called unexplained."""
MATERIAL = 1e-3
"""Contributions below this part of the target are too small to speak of."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a fit found, before it is judged."""

    equations: Equations
    system: System
    strengths: Tensor
    targets: Tensor
    """One column a group of draws, in the rows of the factor."""
    explained: float
    residual_ratio: float
    free: Tensor | None
    """Strengths of the free fit, beside a nonnegative one."""

    @property
    def target(self) -> Tensor:
        """The mean over groups of draws."""
        return self.targets.mean(1)

    @property
    def noise(self) -> float:
        """Part of ‖target‖² that is the noise of the draws, from how far the groups disagree."""
        groups = self.targets.shape[1]
        if groups == 1 or not self.target.norm():
            return 0.0
        spread = (self.targets - self.target[:, None]).square().sum() / (groups * (groups - 1))
        return float(spread / self.target.square().sum())

    @property
    def adjusted(self) -> float:
        """The explained fraction beyond what as many arbitrary columns would explain of noise."""
        chance = min(1.0, self.system.rank / self.equations.rows)
        return (self.explained - chance) / (1 - chance) if chance < 1 else 0.0

    def contribution(self, strengths: Tensor) -> Tensor:
        """‖λ_k φ_k‖ / ‖target‖."""
        return strengths.abs() * self.system.norms / self.target.norm()

    @property
    def of_matrices(self) -> list[bool]:
        """Which columns are entries of a matrix Λ, whose single values mean little."""
        kinds = [family.kind for family in self.equations.families for _ in range(family.size)]
        return [kind in ("diagonal", "symmetric") for kind in kinds]

    @cached_property
    def chances(self) -> dict[str, float]:
        """How probably a random direction adds as much as a column does, matrices' entries apart.

        In a nonnegative fit beside those alone that are above zero; for the ones that are held at
        zero, what they would add to the free fit.
        """
        names = self.equations.names
        chosen = [i for i, matrix in enumerate(self.of_matrices) if not matrix]
        found = chances(self.equations, self.system, self.target, chosen)
        if self.free is not None:
            kept = torch.nonzero(self.strengths > 0)[:, 0].tolist()
            part, system = self.equations.select_columns(kept), System(self.system.design[:, kept])
            places = [i for i, column in enumerate(kept) if column in found]
            above = chances(part, system, self.target, places)
            found |= {kept[i]: value for i, value in above.items()}
        return {names[i]: value for i, value in found.items()}

    def residuals(self) -> Tensor:
        """‖target − design·λ‖ / ‖target‖ over the layers where each column is not zero."""
        squares = torch.zeros_like(self.strengths)
        for block in self.equations.blocks:
            own, count = list(block.columns), len(block.columns)
            target = block.factor[:, count:].mean(1)
            left = target - block.factor[:, :count] @ self.strengths[own]
            squares[own] += left.square().sum()
        return squares.sqrt() / self.target.norm()

    def named(self, chosen: Tensor) -> tuple[str, ...]:
        """Names of the columns that a mask or list of indices chooses."""
        index = torch.nonzero(chosen)[:, 0] if chosen.dtype == torch.bool else chosen
        return tuple(self.equations.names[i] for i in index.tolist())


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


COLLAPSED = 0.99
"""|cosine| from which smooth-L1 and ridge columns count as one."""
CONDITION = 30.0
"""Condition number (of unit columns) from which columns may be collinear …"""
AMPLIFIED = 0.01
"""… and are so called if it amplifies the residual beyond this part of the target."""
CHANCE = 0.01
"""A column that a random direction would match more often than this is no better than chance."""


def undetermined(e: Evidence) -> Iterator[Problem]:
    """Fewer equations than strengths."""
    count = len(e.system.nonzero)
    if e.system.rank < count and e.equations.rows < count:
        yield Problem(
            "underdetermined",
            f"{e.equations.rows} equations for {count} strengths determine {e.system.rank} "
            "combinations of them; shown is the solution of least norm.",
            "Stack more endpoints (tacit.stack), or use a family of fewer coefficients.",
            e.equations.names,
        )


def _collapsed_pairs(e: Evidence) -> list[tuple[int, int]]:
    """Ridge and smooth-L1 columns that are nearly one, however small the residual is.

    A collapsed network has few weights left, and as few equations are solved by any strengths.
    """
    kinds = [family.kind for family in e.equations.families for _ in range(family.size)]
    ridge = [i for i, kind in enumerate(kinds) if kind == "l2"]
    lasso = [i for i, kind in enumerate(kinds) if kind == "smooth_l1"]
    same = torch.nonzero(e.system.cosines[ridge][:, lasso].abs() > COLLAPSED)
    return [(ridge[i], lasso[j]) for i, j in same.tolist()]


def collapsed(e: Evidence) -> Iterator[Problem]:
    """Ridge and smooth L1 that are the same penalty here."""
    for i, j in _collapsed_pairs(e):
        ridge, lasso = e.equations.names[i], e.equations.names[j]
        yield Problem(
            "collapsed",
            f"The gradients of {ridge} and {lasso} have cosine "
            f"{float(e.system.cosines[i, j]):.4f}: nearly all weights are inside the smoothing "
            "width (or of one size), where the two penalties are the same.",
            "Their strengths are not identified apart, unless the fit is exact for other reasons: "
            "drop one, or lower beta.",
            (ridge, lasso),
        )


def collinear(e: Evidence) -> Iterator[Problem]:
    """Gradients that cancel in some combination, exactly or nearly."""
    if not len(e.system.nonzero):
        return  # said by vanishing
    if e.system.rank < len(e.system.nonzero) and e.equations.rows < len(e.system.nonzero):
        return  # said by underdetermined
    pairs = {frozenset(pair) for pair in _collapsed_pairs(e)}
    for combination, exact in _cancelling(e):
        members = _by_size(combination)
        if frozenset(members.tolist()) in pairs:
            continue  # said by collapsed
        names = e.named(members)
        text = _written(names, combination[members])
        inflation = [f"{value:.2g}" for value in e.system.inflation[members].tolist()]
        yield Problem(
            "collinear",
            f"The gradients of {shorten(names)} are linearly dependent ({text} = 0 in unit "
            "columns): only combinations of their strengths are identified; shown is the solution "
            "of least norm."
            if exact
            else f"The gradients of {shorten(names)} nearly cancel ({text} ≈ 0 in unit columns; "
            f"condition {e.system.determined_condition:.0f}, variances inflated {shorten(inflation)} times): "
            "single strengths are unstable.",
            "Drop one of them, or stack endpoints whose weights differ.",
            names,
        )


def _cancelling(e: Evidence) -> Iterator[tuple[Tensor, bool]]:
    """Combinations that cancel exactly, then those that nearly do and by enough to speak of.

    They have zeros for columns that play no part.
    """
    exact = e.system.cancelling()
    yield from ((row, True) for row in torch.where(exact.abs() > 1e-6, exact, 0.0))
    if e.residual_ratio:
        near = e.system.cancelling(max(CONDITION, AMPLIFIED / e.residual_ratio))
        yield from ((row, False) for row in torch.where(near.abs() > 0.1, near, 0.0))


def _by_size(combination: Tensor) -> Tensor:
    """The columns of a combination, the largest first; those of one size in their order."""
    order = combination.abs().round(decimals=6).sort(descending=True, stable=True).indices
    return order[: int(combination.count_nonzero())]


def _written(names: tuple[str, ...], coefficients: Tensor, most: int = 6) -> str:
    """A combination in words: `1.00·l2 − 0.98·smooth_l1`."""
    terms = list(zip(names, coefficients.tolist(), strict=True))
    text = "".join(
        f" {'−' if value < 0 else '+'} {_coefficient(value)}·{name}" for name, value in terms[:most]
    )
    return text.removeprefix(" + ").replace(" − ", "−", text.startswith(" −")) + (
        " + …" if len(terms) > most else ""
    )


def _coefficient(value: float) -> str:
    return f"{abs(value):.2f}" if abs(value) >= 0.01 else f"{abs(value):.1g}"


def vanishing(e: Evidence) -> Iterator[Problem]:
    """Gradients that are zero at these weights."""
    names = e.named(e.system.norms == 0)
    if names:
        yield Problem(
            "vanishing",
            f"The gradient of {shorten(names)} is zero at these weights: its strength cannot be "
            "seen and is shown as 0.",
            "Leave it out, or stack a point where it is not at its minimum.",
            names,
        )


def by_chance(e: Evidence) -> dict[str, float]:
    """Columns that a random direction would match, and how probably it would.

    Not among them: those that are said to be collinear, collapsed or vanishing, and those that
    claim nothing where nothing is left to claim.
    """
    if e.system.rank < len(e.system.nonzero) and e.equations.rows < len(e.system.nonzero):
        return {}  # said by underdetermined
    known = {n for check in (collapsed, collinear, vanishing) for p in check(e) for n in p.names}
    claimed = dict(zip(e.equations.names, e.contribution(e.strengths).tolist(), strict=True))
    return {
        name: chance
        for name, chance in e.chances.items()
        if chance > CHANCE and name not in known and max(claimed[name], e.residual_ratio) > MATERIAL
    }


def chance(e: Evidence) -> Iterator[Problem]:
    """Columns that add no more to the fit than a random direction in their place would."""
    remedy = (
        "Its strength is no finding, nor is its sign: leave it out. To see whether it was at work "
        f"at all, lower what stays unexplained ({_more(e)}), or stack endpoints."
    )
    if e.residual_ratio <= MATERIAL:
        remedy = (
            "There are hardly more equations than strengths here, which any columns would solve: "
            "stack endpoints, or use fewer candidates."
        )
    for name, chance in by_chance(e).items():
        beside = " beside the others" if len(e.system.nonzero) > 1 else ""
        yield Problem(
            "chance",
            f"What {name} adds{beside} is no more than a random direction would: one in its place "
            f"does as well with probability {chance:.2g}.",
            remedy,
            (name,),
        )


def _more(e: Evidence) -> str:
    """What may lower a residual, by what the equations are."""
    if all(source.mode == "difference" for source in e.equations.sources):
        return "more draws, other candidates"
    return "train on, average epochs, add candidates"


def faint(e: Evidence) -> Iterator[Problem]:
    """Columns whose own part of the fit, apart from the others, is below what stays unexplained."""
    if len(e.system.nonzero) < 2 or e.residual_ratio < MATERIAL or e.explained < EXPLAINED:
        return  # nothing is left, or it is said by unexplained
    alone = e.contribution(e.strengths) / e.system.inflation.sqrt()
    known = set(by_chance(e)) | {
        n for problem in (*collapsed(e), *collinear(e)) for n in problem.names
    }
    beside = e.residuals()
    faint = (alone < beside) & (alone > 0)
    faint &= ~torch.tensor([n in known for n in e.equations.names])
    faint &= ~torch.tensor(e.of_matrices)
    for index in torch.nonzero(faint)[:, 0].tolist():
        name = e.equations.names[index]
        yield Problem(
            "faint",
            f"What {name} adds on its own is {float(alone[index]):.1%} of the target, less than "
            f"the {float(beside[index]):.1%} that stays unexplained in its rows: its strength is "
            "at the mercy of that, whatever the others' are.",
            f"Lower what stays unexplained ({_more(e)}), or read the strength as an order of "
            "magnitude at best.",
            (name,),
        )


def drifting(e: Evidence) -> Iterator[Problem]:
    """A trend of the strengths over the steps of a trajectory, against their scatter."""
    for number, source in enumerate(e.equations.sources):
        values = _by_step(e, number, source.steps) if source.steps >= STEPS else None
        if values is None:
            continue
        found = trend(torch.arange(len(values), dtype=values.dtype), values)
        moving = found.drifting & (e.contribution(e.strengths) > MATERIAL)
        yield from drift_problems(e.equations.names, found, moving, "the trajectory")


def drift_problems(
    names: tuple[str, ...], found: Trend, moving: Tensor, over: str
) -> Iterator[Problem]:
    """One Problem for each strength that moves."""
    for index in torch.nonzero(moving)[:, 0].tolist():
        first, last = float(found.first[index]), float(found.last[index])
        yield Problem(
            "drifting",
            f"The strength of {names[index]} moves from {first:.3g} to {last:.3g} over {over}: "
            "one number stands for none of it.",
            "Fit shorter pieces, or each step, and report how it changes.",
            (names[index],),
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
