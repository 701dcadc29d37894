"""Whether strengths can be told apart: from each other, and from chance."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tacit.errors import Problem
from tacit.evidence import EXPLAINED, MATERIAL, Evidence
from tacit.params import shorten

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
    if not len(e.system.seen):
        return  # said by vanishing
    if e.system.rank < len(e.system.seen) and e.equations.rows < len(e.system.seen):
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
            f"condition {e.system.least:.0f}, variances inflated {shorten(inflation)} times): "
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
    if e.system.rank < len(e.system.seen) and e.equations.rows < len(e.system.seen):
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
        beside = " beside the others" if len(e.system.seen) > 1 else ""
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
    if len(e.system.seen) < 2 or e.residual_ratio < MATERIAL or e.explained < EXPLAINED:
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
