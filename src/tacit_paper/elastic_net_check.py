"""The key numbers of `elastic_net`, from its rows alone."""

from collections.abc import Iterator

from tacit_paper import Check, Table
from tacit_paper.checking import at_least, at_most

UNIDENTIFIED = (
    "no signal",
    "unexplained",
    "underdetermined",
    "collapsed",
    "collinear",
    "vanishing",
)
"""Problems that say that a fit identifies nothing; others qualify single strengths."""
GOOD = ((0.01, 0.1), (0.01, 1), (0.1, 0.1), (0.1, 1), (1, 0.1), (1, 1))
"""Cells (λ₁, λ₂) where both penalties shape the network."""


def errors(rows: Table) -> Table:
    """Median relative errors over data sets by cell, and the part of fits with a Problem."""
    measured = rows.assign(
        l1_error=(rows.l1_hat / rows.l1 - 1).abs(),
        l2_error=(rows.l2_hat / rows.l2 - 1).abs(),
        flagged=rows.problems != "",
    )
    return measured.groupby(["l1", "l2"]).agg(
        l1_error=("l1_error", "median"),
        l2_error=("l2_error", "median"),
        flagged=("flagged", "mean"),
    )


def pick(rows: Table, estimate: str, optimizer: str = "sgd") -> Table:
    """Rows of one kind of estimate."""
    return rows[(rows.estimate == estimate) & (rows.optimizer == optimizer)]


def check(rows: Table) -> list[Check]:
    """Key numbers against the expected ones, over the cells that were run."""
    return [found for part in (_accuracy, _flags, _retrained) for found in part(rows)]


def _accuracy(rows: Table) -> Iterator[Check]:
    wanted = (
        ("last", "l2", 0.10, lambda a, b: 1e-3 <= a <= 1 and b in (0.1, 1)),
        ("last", "l1", 0.10, lambda a, b: a == 1 and 1e-3 <= b <= 1),
        ("drift", "l1", 0.05, lambda a, b: 0.01 <= a <= 1 and b <= 1),
        ("drift", "l2", 0.02, lambda a, b: a <= 1 and b in (0.1, 1)),
        ("polished", "l1", 1e-5, lambda a, b: (a, b) in GOOD),
        ("polished", "l2", 1e-5, lambda a, b: (a, b) in GOOD),
    )
    for estimate, strength, bound, belongs in wanted:
        found = errors(pick(rows, estimate))[f"{strength}_error"]
        cells = found[[belongs(a, b) for a, b in found.index]]
        # One noisy point each: a median of the last weights needs all the data sets.
        enough = estimate != "last" or rows.seed.nunique() >= 10
        if len(cells) and enough:
            worst = "λ₁ = {:g}, λ₂ = {:g}".format(*cells.idxmax())
            label = f"{estimate}: median error of λ̂{'₁' if strength == 'l1' else '₂'}, worst cell"
            yield at_most(f"{label} ({worst})", cells.max(), bound)


def _flags(rows: Table) -> Iterator[Check]:
    last, drift = pick(rows, "last"), pick(rows, "drift")
    hopeless = last[(last.l1 == 10) | ((last.l2 == 10) & (last.l1 >= 0.01))]
    if len(hopeless):
        share = (hopeless.problems != "").mean()
        yield at_least("last: part with a Problem where λ is too large", share, 1)
    trusted = errors(drift[drift.problems == ""])[["l1_error", "l2_error"]].max(axis=1)
    if len(trusted):
        label = "drift: larger error of a cell, fits without a Problem, median"
        yield at_most(label, trusted.median(), 0.05)
    for estimate, found in (("last", last), ("drift", drift)):
        good = found[[cell in GOOD for cell in zip(found.l1, found.l2, strict=True)]]
        lost = good.problems.map(lambda kinds: any(kind in kinds for kind in UNIDENTIFIED))
        yield at_most(f"{estimate}: good cells that are called unidentified", lost.mean(), 0)


def _retrained(rows: Table) -> Iterator[Check]:
    again = rows[rows.estimate == "retrained drift"]
    if not len(again):
        return
    closer = (again.control_distance / again.distance).min()
    yield at_least("retrained with the drift-corrected λ̂: times closer, least", closer, 10)
