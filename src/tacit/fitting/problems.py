"""Reasons not to believe a fit, in words a reader can act on.

Thresholds are set so that good fits carry no Problem: an exact answer stays exact at a large
condition number, and a strength of zero may come out slightly negative.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.errors import Problem
from tacit.fitting.chance import chances
from tacit.fitting.drift import MIN_STEPS, Trend, fit_trend
from tacit.fitting.solving import System
from tacit.objective.params import shorten
from tacit.regularizers.quadratic import quadratic_matrix

EXPLAINED = 0.5
"""Fits that explain less than this are called unexplained."""
MATERIAL = 1e-3
"""Contributions below this part of the target are negligible."""
SIGNAL = 10.0
"""Targets below this many times the rounding level are no signal, unless CLEAR is reached."""
CLEAR = 0.95
"""Explained fraction above which even a small target is a signal: rounding follows no column."""
NOISE, NOISY = 0.5, 0.15
"""Noise of the draws as a part of ‖target‖²: above NOISE no signal, above NOISY noisy."""
UNSETTLED = 0.5
"""Relative change of a gradient within an epoch above which the weights are not settled."""
COLLAPSED = 0.99
"""|cosine| above which smooth-L1 and ridge columns count as the same."""
CONDITION = 30.0
"""Condition number of unit columns above which they may be called collinear."""
AMPLIFIED = 0.01
"""Columns are called collinear if the residual is amplified beyond this part of the target."""
CHANCE = 0.01
"""A column that a random direction would match more often than this is no better than chance."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """The numbers of a fit from which its problems are diagnosed."""

    equations: Equations
    system: System
    strengths: Tensor
    targets: Tensor
    """One column per group of draws, in the rows of the factor."""
    explained: float
    residual_ratio: float
    unconstrained: Tensor | None
    """Strengths of the unconstrained fit, for a nonnegative one."""

    @cached_property
    def target(self) -> Tensor:
        """The mean over groups of draws."""
        return self.targets.mean(1)

    @cached_property
    def noise(self) -> float:
        """Part of ‖target‖² that is noise of the draws, from the disagreement of the groups."""
        groups = self.targets.shape[1]
        if groups == 1 or not self.target.norm():
            return 0.0
        spread = (self.targets - self.target[:, None]).square().sum() / (groups * (groups - 1))
        return float(spread / self.target.square().sum())

    @property
    def adjusted(self) -> float:
        """The explained fraction beyond what as many arbitrary columns would explain of noise."""
        expected = min(1.0, self.system.rank / self.equations.rows)
        return (self.explained - expected) / (1 - expected) if expected < 1 else 0.0

    @property
    def underdetermined(self) -> bool:
        """Whether there are fewer equations than strengths."""
        count = len(self.system.nonzero)
        return self.system.rank < count and self.equations.rows < count

    def contributions(self, strengths: Tensor) -> Tensor:
        """‖λ_k φ_k‖ / ‖target‖ of every column φ_k."""
        return strengths.abs() * self.system.norms / self.target.norm()

    @cached_property
    def in_matrix(self) -> Tensor:
        """Which columns are entries of a matrix Λ, whose single values mean little."""
        kinds = [family.kind for family in self.equations.families for _ in range(family.size)]
        in_matrix = [kind in ("diagonal", "symmetric") for kind in kinds]
        return torch.tensor(in_matrix, dtype=torch.bool)

    @cached_property
    def collapsed_pairs(self) -> list[tuple[int, int]]:
        """Ridge and smooth-L1 columns that are nearly the same, however small the residual is.

        A collapsed network has few weights left, and few equations are solved by any strengths.
        """
        kinds = [family.kind for family in self.equations.families for _ in range(family.size)]
        ridge = [i for i, kind in enumerate(kinds) if kind == "l2"]
        lasso = [i for i, kind in enumerate(kinds) if kind == "smooth_l1"]
        same = torch.nonzero(self.system.cosines[ridge][:, lasso].abs() > COLLAPSED)
        return [(ridge[i], lasso[j]) for i, j in same.tolist()]

    @cached_property
    def chances(self) -> dict[str, float]:
        """The probability that a random direction adds as much as a column, without matrices.

        In a nonnegative fit a column is judged beside those above zero; a column at zero by what
        it would add to the unconstrained fit.
        """
        names = self.equations.names
        single = torch.nonzero(~self.in_matrix)[:, 0].tolist()
        by_column = chances(self.equations, self.system, self.target, single)
        if self.unconstrained is not None:
            above = torch.nonzero(self.strengths > 0)[:, 0].tolist()
            part, system = (
                self.equations.select_columns(above),
                System(self.system.design[:, above]),
            )
            places = [i for i, column in enumerate(above) if column in by_column]
            beside_above = chances(part, system, self.target, places)
            by_column |= {above[i]: value for i, value in beside_above.items()}
        return {names[i]: value for i, value in by_column.items()}

    def residuals(self) -> Tensor:
        """‖target − design·λ‖ / ‖target‖ over the layers where each column is not zero."""
        squares = torch.zeros_like(self.strengths)
        for block in self.equations.blocks:
            columns, count = list(block.columns), len(block.columns)
            target = block.factor[:, count:].mean(1)
            residual = target - block.factor[:, :count] @ self.strengths[columns]
            squares[columns] += residual.square().sum()
        return squares.sqrt() / self.target.norm()

    def names_of(self, columns: Tensor) -> tuple[str, ...]:
        """Names of the columns that a mask or a list of indices selects."""
        index = torch.nonzero(columns)[:, 0] if columns.dtype == torch.bool else columns
        return tuple(self.equations.names[i] for i in index.tolist())


def diagnose(evidence: Evidence) -> tuple[Problem, ...]:
    """All problems of a fit, the gravest first; without signal nothing else is worth reporting."""
    no_signal = list(_no_signal(evidence))
    if no_signal:
        return (*no_signal, *_zeros(evidence))
    collapsed, collinear = list(_collapsed(evidence)), list(_collinear(evidence))
    vanishing = list(_vanishing(evidence))
    dependent = [*collapsed, *collinear]
    by_chance = _matched_by_chance(
        evidence, excluded={name for p in (*dependent, *vanishing) for name in p.names}
    )
    problems = (
        _noisy(evidence),
        _unexplained(evidence),
        _underdetermined(evidence),
        collapsed,
        collinear,
        vanishing,
        _unsettled(evidence),
        _chance(evidence, by_chance),
        _faint(evidence, excluded={*by_chance, *(name for p in dependent for name in p.names)}),
        _negative(evidence, by_chance, dependent),
        _indefinite(evidence),
        _drifting(evidence),
        _zeros(evidence),
    )
    return tuple(problem for group in problems for problem in group)


def _no_signal(e: Evidence) -> Iterator[Problem]:
    length, floor = float(e.target.norm()), e.equations.floor
    # Rounding has no direction: what a few columns explain in many rows is not rounding.
    if length == 0 or (length <= SIGNAL * floor and e.adjusted < CLEAR):
        yield Problem(
            "no signal",
            f"The target's norm {length:.2g} is at the level of rounding ({floor:.2g}), and these "
            "regularizers do not explain it: there is nothing to match.",
            "Evaluate in float64; if the training loss is near zero, use an earlier point or the "
            "trajectory. This does not mean that there was no regularization.",
        )
    elif e.noise > NOISE:
        yield Problem(
            "no signal",
            f"{min(e.noise, 1):.0%} of the target's squared norm is noise of the draws: the "
            "groups of draws do not agree on a target.",
            "Pass more draws to the technique's objective: the noise falls as one over their "
            "number.",
        )


def _noisy(e: Evidence) -> Iterator[Problem]:
    if e.noise > NOISY:
        yield Problem(
            "noisy",
            f"{e.noise:.0%} of the target's squared norm is noise of the draws: strengths and "
            "shares are uncertain by as much.",
            "Pass more draws to the technique's objective, until it is below 5 %.",
            e.equations.names,
        )


def _unexplained(e: Evidence) -> Iterator[Problem]:
    if e.explained >= EXPLAINED:
        return
    modes = {source.mode for source in e.equations.sources}
    if modes == {"difference"}:
        remedy = "Another regularizer is at work: add candidates, or split them with layerwise()."
    elif modes == {"trajectory"}:
        remedy = (
            "Either another regularizer is at work, or the steps carry noise (minibatches, kinks): "
            "add candidates, and average over steps or use the full batch to separate the two."
        )
    else:
        remedy = (
            "Either another regularizer is at work, or training had not finished: one endpoint "
            "cannot separate the two. Add candidates; and train on, or minimise L + R from here: "
            "what changes was unfinished training, what stays is a missing regularizer."
        )
    message = f"These regularizers explain {max(e.explained, 0):.1%} of the target."
    yield Problem("unexplained", message, remedy, e.equations.names)


def _underdetermined(e: Evidence) -> Iterator[Problem]:
    if e.underdetermined:
        yield Problem(
            "underdetermined",
            f"{e.equations.rows} equations for {len(e.system.nonzero)} strengths determine only "
            f"{e.system.rank} combinations of them; the solution of least norm is shown.",
            "Stack more endpoints (tacit.stack), or use a family with fewer coefficients.",
            e.equations.names,
        )


def _collapsed(e: Evidence) -> Iterator[Problem]:
    for i, j in e.collapsed_pairs:
        ridge, lasso = e.equations.names[i], e.equations.names[j]
        yield Problem(
            "collapsed",
            f"The gradients of {ridge} and {lasso} have cosine "
            f"{float(e.system.cosines[i, j]):.4f}: nearly all weights are inside the smoothing "
            "width (or have the same size), where the two penalties are the same.",
            "Their strengths cannot be separated, unless the fit is exact for other reasons: "
            "drop one, or lower beta.",
            (ridge, lasso),
        )


def _collinear(e: Evidence) -> Iterator[Problem]:
    """Gradients that cancel in some combination, exactly or nearly."""
    if not len(e.system.nonzero) or e.underdetermined:
        return  # reported as vanishing, or as underdetermined
    collapsed = {frozenset(pair) for pair in e.collapsed_pairs}
    for combination, exact in _cancelling_combinations(e):
        columns = _largest_first(combination)
        if frozenset(columns.tolist()) in collapsed:
            continue  # reported as collapsed
        names = e.names_of(columns)
        formula = _format_combination(names, combination[columns])
        inflation = [f"{value:.2g}" for value in e.system.inflation[columns].tolist()]
        yield Problem(
            "collinear",
            f"The gradients of {shorten(names)} are linearly dependent ({formula} = 0 in unit "
            "columns): only combinations of their strengths are identified; the solution of least "
            "norm is shown."
            if exact
            else f"The gradients of {shorten(names)} nearly cancel ({formula} ≈ 0 in unit columns; "
            f"condition {e.system.determined_condition:.0f}, variances inflated "
            f"{shorten(inflation)} times): their individual strengths are unstable.",
            "Drop one of them, or stack endpoints whose weights differ.",
            names,
        )


def _cancelling_combinations(e: Evidence) -> Iterator[tuple[Tensor, bool]]:
    """Combinations that cancel exactly, then those that nearly do and matter for this residual.

    Their coefficients are zero for columns that take no part.
    """
    limits = [(math.inf, 1e-6)]
    if e.residual_ratio:
        limits.append((max(CONDITION, AMPLIFIED / e.residual_ratio), 0.1))
    for condition, smallest in limits:
        rows = e.system.cancelling(condition)
        for row in torch.where(rows.abs() > smallest, rows, 0.0):
            yield row, math.isinf(condition)


def _largest_first(combination: Tensor) -> Tensor:
    """The columns of a combination, the largest coefficient first; equal ones in their order."""
    order = combination.abs().round(decimals=6).sort(descending=True, stable=True).indices
    return order[: int(combination.count_nonzero())]


def _format_combination(names: tuple[str, ...], coefficients: Tensor, most: int = 6) -> str:
    """A combination as text: `1.00·l2 − 0.98·smooth_l1`."""
    terms = list(zip(names, coefficients.tolist(), strict=True))
    text = "".join(
        f" {'−' if value < 0 else '+'} {_format_size(value)}·{name}" for name, value in terms[:most]
    )
    return text.removeprefix(" + ").replace(" − ", "−", text.startswith(" −")) + (
        " + …" if len(terms) > most else ""
    )


def _format_size(value: float) -> str:
    return f"{abs(value):.2f}" if abs(value) >= 0.01 else f"{abs(value):.1g}"


def _vanishing(e: Evidence) -> Iterator[Problem]:
    names = e.names_of(e.system.norms == 0)
    if names:
        yield Problem(
            "vanishing",
            f"The gradient of {shorten(names)} is zero at these weights: its strength cannot be "
            "estimated and is shown as 0.",
            "Leave it out, or stack a point where it is not at its minimum.",
            names,
        )


def _unsettled(e: Evidence) -> Iterator[Problem]:
    """Gradients that change within the noise of the weights, so that no point is an optimum."""
    largest: dict[str, float] = {}
    for source in e.equations.sources:
        for name, change in source.unsettled.items():
            largest[name] = max(change, largest.get(name, 0.0))
    for name, change in largest.items():
        known = any(name in source.known for source in e.equations.sources)
        if change > UNSETTLED and (known or name in e.equations.names):
            yield Problem(
                "unsettled",
                f"Over the epoch the mean gradient of {name} differs from the gradient at the mean "
                f"weights by {change:.0%} of its norm: the weights oscillate across the kink, and "
                "no single point is an optimum of L + R.",
                "The step size is too large for this penalty: lower it, and train on. The strength "
                "that the steps applied may still be right.",
                (name,),
            )


def _matched_by_chance(e: Evidence, *, excluded: set[str]) -> dict[str, float]:
    """Columns that a random direction would match, with the probability that it does.

    Without the excluded columns, which have other problems, and without negligible ones.
    """
    if e.underdetermined:
        return {}
    contributions = e.contributions(e.strengths).tolist()
    sizes = dict(zip(e.equations.names, contributions, strict=True))
    return {
        name: probability
        for name, probability in e.chances.items()
        if probability > CHANCE
        and name not in excluded
        and max(sizes[name], e.residual_ratio) > MATERIAL
    }


def _chance(e: Evidence, by_chance: dict[str, float]) -> Iterator[Problem]:
    remedy = (
        "Do not interpret its value or sign: leave it out. To test whether it was applied at all, "
        f"reduce what is unexplained ({_ways_to_explain_more(e)}), or stack endpoints."
    )
    if e.residual_ratio <= MATERIAL:
        remedy = (
            "There are hardly more equations than strengths, so that any columns would solve them: "
            "stack endpoints, or use fewer candidates."
        )
    beside = " beside the others" if len(e.system.nonzero) > 1 else ""
    for name, probability in by_chance.items():
        yield Problem(
            "chance",
            f"What {name} adds{beside} is no more than a random direction would add: one in its "
            f"place adds as much with probability {probability:.2g}.",
            remedy,
            (name,),
        )


def _ways_to_explain_more(e: Evidence) -> str:
    if all(source.mode == "difference" for source in e.equations.sources):
        return "more draws, other candidates"
    return "train on, average epochs, add candidates"


def _faint(e: Evidence, *, excluded: set[str]) -> Iterator[Problem]:
    """Columns that add less, apart from the others, than what is unexplained in their rows."""
    if len(e.system.nonzero) < 2 or e.residual_ratio < MATERIAL or e.explained < EXPLAINED:
        return  # nothing is left, or it is reported as unexplained
    unique = e.contributions(e.strengths) / e.system.inflation.sqrt()
    residuals = e.residuals()
    faint = (unique < residuals) & (unique > 0) & ~e.in_matrix
    faint &= ~torch.tensor([name in excluded for name in e.equations.names])
    for index in torch.nonzero(faint)[:, 0].tolist():
        name = e.equations.names[index]
        yield Problem(
            "faint",
            f"What {name} adds beyond the others is {float(unique[index]):.1%} of the target, less "
            f"than the {float(residuals[index]):.1%} that is unexplained in its rows: the "
            "unexplained part dominates its strength.",
            f"Reduce what is unexplained ({_ways_to_explain_more(e)}), or read the strength as an "
            "order of magnitude at best.",
            (name,),
        )


def _negative(
    e: Evidence, by_chance: Iterable[str], dependent: Iterable[Problem]
) -> Iterator[Problem]:
    free = e.unconstrained is None
    strengths = e.strengths if e.unconstrained is None else e.unconstrained
    by_name = dict(zip(e.equations.names, strengths.tolist(), strict=True))
    below = (strengths < 0) & (e.contributions(strengths) > MATERIAL) & ~e.in_matrix
    meaningless = set(by_chance)  # the sign of what chance explains means nothing
    for problem in dependent:  # nor do opposite signs of columns that cannot be separated
        values = [by_name[name] for name in problem.names]
        meaningless |= set(problem.names) if min(values) < 0 < max(values) else set()
    names = tuple(name for name in e.names_of(below) if name not in meaningless)
    if not names:
        return
    values = ", ".join(f"{by_name[name]:.3g}" for name in names[:6])
    verb = "comes out as" if free else "is zero, where the unconstrained fit has"
    remedy = " nonnegative=True gives the best fit without it." if free else ""
    yield Problem(
        "negative",
        f"The strength of {shorten(names)} {verb} {values}: a negative strength rewards a larger "
        "penalty.",
        "Such a penalty was not minimised here: another regularizer that is correlated with it is "
        f"probably missing, or training was unfinished.{remedy}",
        names,
    )


def _indefinite(e: Evidence) -> Iterator[Problem]:
    for kind, coefficients in e.equations.matrices(e.strengths.tolist()):
        matrix = quadratic_matrix(torch.tensor(coefficients, dtype=torch.float64), kind)
        eigenvalues = torch.linalg.eigvalsh(matrix)
        if eigenvalues[0] < -MATERIAL * eigenvalues.abs().max():
            yield Problem(
                "indefinite",
                f"The {kind} Λ has eigenvalues from {float(eigenvalues[0]):.3g} to "
                f"{float(eigenvalues[-1]):.3g}: θᵀΛθ is not a penalty in every direction.",
                "L + θᵀΛθ may have no minimum: check that the Hessian of the sum is positive "
                "definite before retraining with it.",
            )


def _drifting(e: Evidence) -> Iterator[Problem]:
    """A trend of the strengths over the steps of a trajectory, larger than their scatter."""
    for number, source in enumerate(e.equations.sources):
        strengths = _strengths_by_step(e, number) if source.steps >= MIN_STEPS else None
        if strengths is None:
            continue
        trend = fit_trend(torch.arange(len(strengths), dtype=strengths.dtype), strengths)
        drifting = trend.drifting & (e.contributions(e.strengths) > MATERIAL)
        yield from drift_problems(e.equations.names, trend, drifting, "the trajectory")


def drift_problems(
    names: tuple[str, ...], trend: Trend, drifting: Tensor, period: str
) -> Iterator[Problem]:
    """One Problem for each strength that drifts over a period."""
    for index in torch.nonzero(drifting)[:, 0].tolist():
        first, last = float(trend.first[index]), float(trend.last[index])
        yield Problem(
            "drifting",
            f"The strength of {names[index]} moves from {first:.3g} to {last:.3g} over {period}: "
            "one number does not describe it.",
            "Fit shorter pieces, or each step, and report how it changes.",
            (names[index],),
        )


def _strengths_by_step(e: Evidence, source: int) -> Tensor | None:
    """The strengths of every single step; None if a step does not determine them."""
    count, strengths = len(e.strengths), []
    for step in e.equations.steps(source):
        factor = step.factor()
        system = System(factor[:, :count])
        if system.rank < count:
            return None
        strengths.append(system.solve(factor[:, count:].mean(1, keepdim=True))[:, 0])
    return torch.stack(strengths)


def _zeros(e: Evidence) -> Iterator[Problem]:
    left_out = sum(block.left_out for block in e.equations.blocks)
    if left_out:
        total = left_out + e.equations.rows
        yield Problem(
            "zeros",
            f"{left_out:,} of {total:,} rows lie at a kink of a regularizer (θ = 0 under l1): "
            "their condition is an inequality, so they are in no equation.",
            "No action is needed: the other rows carry the estimate.",
        )
