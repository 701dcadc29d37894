"""The numbers of a fit from which its problems are diagnosed, and their thresholds.

Thresholds are set so that good fits carry no Problem: an exact answer stays exact at a large
condition number, and a strength of zero may come out slightly negative.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.equations.noise import noise_in_columns
from tacit.fitting.chance import chances, chances_among, family_chances
from tacit.fitting.column_noise import noise_by_label
from tacit.fitting.error_bars import factors_by_label
from tacit.fitting.shares import products_of_points
from tacit.fitting.solving import System

MIN_EXPLAINED = 0.5
"""Fits that explain less than this are called unexplained."""
SAME_STEP = 0.02
"""Relative difference up to which step sizes of a trajectory count as equal."""
WELL_EXPLAINED = 0.99
"""Fits that explain less than this lack fit, unless noise that was measured accounts for it."""
LACK_OF_FIT = 0.01
"""Level of the test whether a residual is more than measured noise."""
NEGLIGIBLE = 1e-3
"""Contributions below this part of the target are negligible."""
MIN_SIGNAL = 10.0
"""Targets below this many times the rounding level are no signal, unless clearly explained."""
CLEARLY_EXPLAINED = 0.95
"""Explained fraction above which even a small target is a signal: rounding follows no column."""
MAX_NOISE, NOISY = 0.5, 0.15
"""Noise as a part of ‖target‖²: above MAX_NOISE there is no signal, above NOISY it is noisy."""
ROUNDED = 0.05
"""Part of the target by which rounding may change a contribution before it is reported."""
COLUMN_NOISE = 0.6
"""Noise as a part of a column's square, beside the other columns: above, it is mostly noise."""
FEWEST_GROUPS = 4
"""Groups of probes below which they do not measure their noise."""
UNSETTLED = 0.5
"""Relative change of a gradient within an epoch above which the weights are not settled."""
IGNORED = 0.01
"""Part of the examples or tokens that the loss may ignore without a Problem."""
CLIPPED = 0.1
"""Part of the updates whose gradients may look clipped without a Problem."""
BURN_IN = 0.05
"""Part of ‖target‖ that an optimizer's unsettled averages may cause without a Problem."""
RUNAWAY = 30.0
"""A fit whose Λ ⪰ 0 is this many times as large as the unconstrained Λ has no limit."""
COLLAPSED = 0.99
"""|cosine| above which smooth-L1 and ridge columns count as the same."""
MIN_CONDITION = 30.0
"""Condition number of unit columns above which they may be called collinear."""
AMPLIFIED = 0.01
"""Columns are called collinear if the residual is amplified beyond this part of the target."""
MAX_CHANCE = 0.01
"""A column that a random direction would match more often than this is no better than chance."""

Combination = tuple[list[int], list[float]]
"""Columns and their coefficients, the largest first."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known about a fit, one number or one tensor over the columns each."""

    equations: Equations
    system: System
    strengths: Tensor
    explained: float
    residual_ratio: float
    nonnegative: bool
    psd: bool
    unconstrained: Tensor
    """Strengths of the unconstrained fit, which may be negative."""
    target_norm: float
    noise: float
    """Part of ‖target‖² that is noise of the draws."""
    adjusted: float
    """The explained fraction beyond what as many arbitrary columns would explain of noise."""
    underdetermined: bool
    """Whether there are fewer equations than strengths."""
    contributions: Tensor
    """‖λ_k φ_k‖ / ‖target‖ of every column φ_k."""
    residuals: Tensor
    """‖target − design·λ‖ / ‖target‖ over the layers where each column is not zero."""
    in_matrix: Tensor
    """Which columns are entries of a matrix Λ or of a curve, whose single values mean little."""
    collapsed: list[tuple[int, int]]
    """Ridge and smooth-L1 columns that are nearly the same."""
    dependent: list[Combination]
    """Combinations of unit columns that cancel exactly."""
    nearly_dependent: list[Combination]
    """Combinations of unit columns that nearly cancel, and matter for this residual."""
    chances: dict[int, float]
    """The probability that a random direction adds as much as a column, without matrices."""
    family_chances: dict[tuple[int, ...], float]
    """For the columns of each curve, the probability that as many random directions do."""
    column_noise: dict[int, float]
    """Part of the square of a column from random probes, beside the others, that is noise."""


def gather_evidence(
    equations: Equations,
    system: System,
    targets: Tensor,
    strengths: Tensor,
    explained: float,
    residual_ratio: float,
    *,
    nonnegative: bool,
    psd: bool = False,
) -> Evidence:
    """The evidence about a fit; targets have one column per group of draws."""
    target, columns_in_use = targets.mean(1), len(system.nonzero)
    length = target.norm()
    bounded = equations.bounded(nonnegative=nonnegative)
    constrained = psd or bool(bounded.any())
    unconstrained = system.solve(target[:, None])[:, 0] if constrained else strengths
    kinds = [family.kind for family in equations.families for _ in range(family.size)]
    in_matrix = torch.tensor([kind in ("diagonal", "symmetric", "spline") for kind in kinds])
    expected = min(1.0, system.rank / equations.rows)
    underdetermined = system.rank < columns_in_use and equations.rows < columns_in_use
    dependent, nearly_dependent = [], []
    if columns_in_use and not underdetermined:
        at_knots = System(system.design @ _values_at_knots(equations))
        dependent = _cancelling(system, math.inf, smallest=1e-6)
        if residual_ratio:
            condition = max(MIN_CONDITION, AMPLIFIED / residual_ratio)
            nearly_dependent = _cancelling(at_knots, condition, smallest=0.1)
    by_column = chances(equations, system, target, torch.nonzero(~in_matrix)[:, 0].tolist())
    if bounded.any():  # a column above zero is judged beside the others above zero
        positive = torch.nonzero((strengths > 0) | ~bounded)[:, 0].tolist()
        by_column |= chances_among(positive, equations, system.design, target, judged=by_column)
    return Evidence(
        equations=equations,
        system=system,
        strengths=strengths,
        explained=explained,
        residual_ratio=residual_ratio,
        nonnegative=nonnegative,
        psd=psd,
        unconstrained=unconstrained,
        target_norm=float(length),
        noise=_noise(targets),
        adjusted=(explained - expected) / (1 - expected) if expected < 1 else 0.0,
        underdetermined=underdetermined,
        contributions=strengths.abs() * system.norms / length,
        residuals=_residuals(equations, strengths) / length,
        in_matrix=in_matrix,
        collapsed=_collapsed_pairs(system, kinds),
        dependent=dependent,
        nearly_dependent=nearly_dependent,
        chances=by_column,
        family_chances=family_chances(equations, system, target),
        column_noise=_column_noise(equations),
    )


def _values_at_knots(equations: Equations) -> Tensor:
    """The strengths as a function of values at knots: rises of a convex curve are differences.

    Neighbouring rises have nearly the same column, but the curve may be well determined.
    """
    matrix, start = torch.eye(len(equations.names), dtype=torch.float64), 0
    for family in equations.families:
        if family.shape is not None and family.shape.convex:
            rises = range(start + 1, start + family.size)
            matrix[list(rises), [j - 1 for j in rises]] = -1
        start += family.size
    return matrix


def _noise(targets: Tensor) -> float:
    """Part of ‖target‖² that is noise, from the disagreement of the groups of draws."""
    groups, target = targets.shape[1], targets.mean(1)
    if groups == 1 or not target.norm():
        return 0.0
    spread = (targets - target[:, None]).square().sum() / (groups * (groups - 1))
    return float(spread / target.square().sum())


def _column_noise(equations: Equations) -> dict[int, float]:
    """The noise of columns from random probes, by index."""
    scatter = equations.scatter()
    if scatter is None:
        return {}
    return noise_in_columns(equations.noisy_factor(), len(equations.names), scatter)


def _residuals(equations: Equations, strengths: Tensor) -> Tensor:
    """‖target − design·λ‖ over the layers where each column is not zero."""
    squares = torch.zeros_like(strengths)
    if products_of_points(equations) is not None:  # net of noise, as the explained part is
        residual = torch.cat([-strengths, torch.ones(1, dtype=strengths.dtype)])
        for layer in equations.layers:
            products = products_of_points(equations, layer)
            columns = {
                c for block in equations.blocks if block.layer == layer for c in block.columns
            }
            if products is not None:
                squares[[*columns]] += residual @ products @ residual
        return squares.clamp_min(0).sqrt()
    labels = [(b.layer, b.columns) for b in equations.blocks]
    parts, noise = factors_by_label(equations, labels), noise_by_label(equations, labels)
    for index, ((_, columns), factor) in enumerate(parts.items()):
        square = (factor[:, -1] - factor[:, :-1] @ strengths).square().sum()
        if noise is not None:  # of the columns
            noisy = strengths[list(noise.noisy)]
            square = square - noisy @ noise.noises[index] @ noisy
        squares[list(columns)] += square
    return squares.clamp_min(0).sqrt()


def _collapsed_pairs(system: System, kinds: list[str]) -> list[tuple[int, int]]:
    """Ridge and smooth-L1 columns that are nearly the same, however small the residual is.

    A collapsed network has few weights left, and few equations are solved by any strengths.
    """
    ridge = [i for i, kind in enumerate(kinds) if kind == "l2"]
    lasso = [i for i, kind in enumerate(kinds) if kind == "smooth_l1"]
    same = torch.nonzero(system.cosines[ridge][:, lasso].abs() > COLLAPSED)
    return [(ridge[i], lasso[j]) for i, j in same.tolist()]


def _cancelling(system: System, condition: float, *, smallest: float) -> list[Combination]:
    """Combinations that cancel to that condition, without coefficients below the smallest."""
    combinations = []
    for row in system.cancelling(condition):
        row = torch.where(row.abs() > smallest, row, 0.0)
        # Coefficients that are equal up to rounding stay in the order of the columns.
        order = row.abs().round(decimals=6).sort(descending=True, stable=True).indices
        columns = order[: int(row.count_nonzero())]
        combinations.append((columns.tolist(), row[columns].tolist()))
    return combinations
