"""What the paper says about known penalties, beside the numbers of the rows."""

import math
from collections.abc import Callable

from tacit_paper import Claim, Evidence, Table
from tacit_paper.elastic_net.checks import (
    format_range,
    median_errors,
    select_estimate,
)

ACCURATE = 0.1
"""Median relative error of both strengths up to which a cell counts as recovered."""
GRID = 36
"""Cells of the paper's grid."""


def measure_recovery(rows: Table) -> Evidence | None:
    """Number of cells in which both strengths are recovered, by estimate."""
    published, epochs, minima = (
        _larger_errors(rows, estimate) for estimate in ("published", "drift", "polished")
    )
    if len(epochs) < GRID or not len(minima):
        return None
    counts = [int((errors <= ACCURATE).sum()) for errors in (published, epochs, minima)]
    text = (
        f"cells with both within 10 %: published {counts[0]} of {len(published)}, epochs "
        f"{counts[1]}, minima {counts[2]} of {len(minima)}"
    )
    agrees = counts[0] <= 6 and counts[1] >= len(epochs) / 2 and counts[2] == len(minima)
    return _evidence(text, agrees)


def measure_intermediate(rows: Table) -> Evidence | None:
    """Errors where both strengths lie between 0.01 and 1."""
    tables = [_cells(rows, e, _is_intermediate) for e in ("published", "drift")]
    if len(tables[1]) < 9:
        return None
    published, epochs = tables
    text = (
        f"published: λ₁ off by {format_range(published.l1_error)}, λ₂ by "
        f"{format_range(published.l2_error)}; means over epochs: at most {_worst(epochs):.0%}"
    )
    strong = published.l2_error[[l2 >= 0.1 for _, l2 in published.index]]
    agrees = _worst(epochs) <= 0.05 and strong.max() <= 0.2 and published.l1_error.median() >= 0.2
    return _evidence(text, bool(agrees))


def measure_small(rows: Table) -> Evidence | None:
    """Errors of strengths of 10⁻³ and 10⁻⁴, where the other penalty is at most 0.1."""
    last, epochs = (median_errors(select_estimate(rows, e)) for e in ("last", "drift"))
    if len(epochs) < GRID:
        return None
    weak = [l1 == 1e-3 and l2 <= 0.1 for l1, l2 in epochs.index]
    weak_ridge = [l2 == 1e-3 and l1 <= 0.1 for l1, l2 in epochs.index]
    weakest_ridge = [l2 == 1e-4 and l1 <= 0.1 for l1, l2 in epochs.index]
    before, after = (
        [*errors.l1_error[weak], *errors.l2_error[weak_ridge]] for errors in (last, epochs)
    )
    unreached = epochs.l2_error[weakest_ridge]
    text = (
        f"10⁻³ at last weights off by {min(before):.0%} or more, from epochs {max(after):.0%} or "
        f"less; λ₂ = 10⁻⁴ by {format_range(unreached)}"
    )
    return _evidence(
        text, bool(max(after) <= 0.1 and min(before) >= 0.4 and unreached.min() >= 0.2)
    )


def measure_large(rows: Table) -> Evidence | None:
    """How nearly parallel the two columns become, and how many fits say so, at λ₂ = 10."""
    last = select_estimate(rows, "last")
    if last.groupby(["l1", "l2"]).ngroups < GRID:
        return None
    large = last[(last.l2 == 10) & (last.l1 < 10)]
    others = last[(last.l2 < 10) & (last.l1 < 10)]
    conditions = [table.groupby(["l1", "l2"]).condition.median() for table in (large, others)]
    flagged = (large.problems != "").mean()
    ends = [f"{v:.0f}" if math.isfinite(v) else "∞" for v in conditions[0].agg(["min", "max"])]
    text = (
        f"condition number at λ₂ = 10: {ends[0]} to {ends[1]} (else ≤ {conditions[1].max():.1f}), "
        f"{flagged:.0%} with a Problem"
    )
    agrees = conditions[0].min() > 3 * conditions[1].max() and flagged >= 0.9
    return _evidence(text, bool(agrees))


def measure_nonsmooth(rows: Table) -> Evidence | None:
    """What share of λ₁ comes back from networks trained with |θ| itself."""
    published = rows[rows.estimate == "nonsmooth published"]
    if not len(published):
        return None
    ratio = (published.l1_hat / published.l1).groupby([published.l1, published.l2]).median()
    epochs = median_errors(rows[rows.estimate == "nonsmooth drift"]).l1_error
    crossing = published.groupby(["l1", "l2"]).crossing.median()
    text = (
        f"λ̂₁/λ₁ as published {ratio.min():.3f}–{ratio.max():.2f}; from mean signs within "
        f"{epochs.max():.1%}; {crossing.min():.0%}+ of weights cross zero"
    )
    agrees = ratio.max() <= 0.6 and epochs.max() <= 0.05 and crossing.min() >= 0.5
    return _evidence(text, bool(agrees))


def measure_curvature(rows: Table) -> Evidence | None:
    """Whether the Hessian of L + R is positive definite: where SGD stopped, and at minima.

    Where SGD stopped there is one certificate per network and set of strengths: true, from epochs,
    and from the last weights.
    """
    last = rows[rows.estimate.str.startswith("retrained")]
    minima = rows[rows.estimate == "polished"]
    if "curvature" not in rows or len(last) <= 3:
        return None
    negative = int((last.curvature < 0).sum())
    definite = int(((minima.curvature > 0) & (minima.verdict == "locally unique")).sum())
    text = (
        f"where SGD stops: negative curvature for {negative} of {len(last)} fits; at minima: "
        f"positive definite, {definite} of {len(minima)}"
    )
    return _evidence(text, negative >= len(last) / 2 and definite >= 0.9 * len(minima))


def measure_retraining(rows: Table) -> Evidence | None:
    """Distance to the original weights after retraining, relative to the control's."""
    if (rows.estimate == "retrained drift").sum() < 2:
        return None
    epochs, last = (
        rows[rows.estimate == f"retrained {name}"].eval("distance / control_distance")
        for name in ("drift", "last")
    )
    text = (
        f"distance over the control's: λ̂ from epochs ≤ {epochs.max():.1%}, from last weights up "
        f"to {last.max():.0%}"
    )
    return _evidence(text, bool(epochs.max() <= 0.02 and last.max() >= 0.1))


def _evidence(text: str, agrees: bool) -> Evidence:
    """Evidence whose percentages are written as in all other texts, with a space."""
    return Evidence(text.replace(" %", "%").replace("%", " %"), agrees)


def _larger_errors(rows: Table, estimate: str) -> Table:
    """By cell, the larger of the two median errors."""
    return median_errors(select_estimate(rows, estimate))[["l1_error", "l2_error"]].max(axis=1)


def _cells(rows: Table, estimate: str, chosen: Callable[[float, float], bool]) -> Table:
    """Median errors in the chosen cells."""
    errors = median_errors(select_estimate(rows, estimate))
    return errors[[chosen(l1, l2) for l1, l2 in errors.index]]


def _is_intermediate(l1: float, l2: float) -> bool:
    return 0.01 <= l1 <= 1 and 0.01 <= l2 <= 1


def _worst(errors: Table) -> float:
    return float(errors[["l1_error", "l2_error"]].max().max())


CLAIMS = (
    Claim(
        "The method recovers known ℓ₁ and ℓ₂ penalties of networks.",
        "Abstract",
        "holds with a caveat",
        measure_recovery,
        "It needs a stationary point: the last weights of SGD are one noisy draw around it.",
        headline=True,
    ),
    Claim(
        "For intermediate penalties, recovery is quite accurate.",
        "Sec. 3, Elastic net",
        "holds with a caveat",
        measure_intermediate,
        "As published only λ₂ ≥ 0.1 and λ₁ = 1; with means over epochs everywhere.",
    ),
    Claim(
        "For very small penalties there is not much signal for estimation.",
        "Sec. 3, Elastic net",
        "artefact",
        measure_small,
        "The noise of the last weights hides the signal; only at λ₂ = 10⁻⁴ is there too little.",
        headline=True,
    ),
    Claim(
        "Large penalties, which drive weights to zero, reduce identifiability.",
        "Sec. 3, Elastic net",
        "holds",
        measure_large,
    ),
    Claim(
        "ℓ₁ without smoothing failed, likely because it hinders optimisation and biases to zero.",
        "App. H, Elastic net",
        "artefact",
        measure_nonsmooth,
        "Weights held at zero jump across it: a sign at one point is noise, its mean is not.",
    ),
    Claim(
        "That the regularized objective has a positive definite Hessian at θ̂ is quite plausible.",
        "App. A",
        "holds with a caveat",
        measure_curvature,
        "It holds at minima; the weights at which SGD stops mostly are none.",
    ),
    Claim(
        "Retraining with the estimated regularizer recovers the weights.",
        "App. A",
        "holds with a caveat",
        measure_retraining,
        "From the same start and batches, and only with strengths that are accurate.",
    ),
)
