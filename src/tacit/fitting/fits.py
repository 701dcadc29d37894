"""From equations to strengths: exact least squares on the small factor, with its diagnostics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from tacit.display import Format, render
from tacit.display.frames import make_frame
from tacit.equations.equations import Equations
from tacit.equations.sources import Source
from tacit.errors import InputError, Problem, ProblemKind, check_choice
from tacit.fitting.checks import check_arguments, check_scale
from tacit.fitting.curves import Curve, curve_of
from tacit.fitting.error_bars import KINDS, ErrorBars, error_bars_from
from tacit.fitting.evidence import MIN_EXPLAINED, gather_evidence
from tacit.fitting.findings import findings
from tacit.fitting.fit_difference import FitDifference, difference_of
from tacit.fitting.fit_plot import PlotKind, draw_fit
from tacit.fitting.fit_rows import (
    By,
    coefficient_rows,
    layer_rows,
    regression_statistic,
    strength_rows,
)
from tacit.fitting.halving import check_halved, halved_equations, step_errors
from tacit.fitting.metrics import metrics_of
from tacit.fitting.problems import diagnose
from tacit.fitting.semidefinite import cones_of, solver
from tacit.fitting.shares import net_shares, products_of_points, unique_shares
from tacit.fitting.solving import System, between_groups
from tacit.fitting.summary import TARGETS, jsonable, summarize
from tacit.regularizers.quadratic import quadratic_matrix

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True)
class Fit:
    """Strengths, how much they explain, and every reason not to believe them.

    All numbers are plain floats. `shares` sum to `explained`.
    """

    strengths: Mapping[str, float]
    explained: float
    """Fraction of the target's squared norm that the fit explains (uncentred R²).

    Where noise is measured, by groups of draws or by three or more epochs, it is net of noise, and
    so are `shares`; for epochs also `cosine` and `residual_ratio`.
    """
    shares: Mapping[str, float]
    """⟨λ_k ∇R_k, target⟩ / ‖target‖² of each regularizer."""
    cosine: float
    """Cosine between the fitted combination and the target."""
    residual_ratio: float
    """‖target − design·λ‖ / ‖target‖."""
    matching_loss: float
    """‖target − design·λ‖² / rows: the mean over all equations of (∇L + Σ λ_k ∇R_k)², which is the
    objective that learning a regularizer minimises (Eq. 3 of the paper, 1/p ‖∇R + ∇L‖²). It has the
    units of a squared gradient, and is (residual_ratio · ‖target‖)² / rows."""
    condition: float
    """Condition number of the design with unit columns; infinite if they are dependent."""
    inflation: Mapping[str, float]
    """How many times the other columns inflate the variance of a strength."""
    gradient_norm: float
    """‖∇L‖ over all parameters, also in the fit of a layer (root mean square of several points)."""
    rank: int
    """How many combinations of the strengths the equations determine."""
    rows: int
    """The number of equations."""
    problems: tuple[Problem, ...]
    nonnegative: bool
    sources: tuple[Source, ...] = field(repr=False)
    unconstrained: "Fit | None" = field(repr=False)
    """The unconstrained fit, for one under λ ≥ 0 or Λ ⪰ 0, and for one of a convex shape."""
    equations: Equations = field(repr=False, compare=False)
    added_error_bars: tuple[ErrorBars, ...] = field(default=(), repr=False, compare=False)
    """Error bars that need more than the equations, such as those of sampling."""
    findings: tuple[str, ...] = ()
    """What is remarkable without being a reason for doubt: negative strengths in differences and
    trajectories that are explained, and rows at kinks."""
    halved: "Fit | None" = field(default=None, repr=False, compare=False)
    """The fit at half the step size, of a trajectory that was compared with a flow, or at half the
    scale of a technique."""
    psd: bool = False
    """Whether it was fitted under Λ ⪰ 0."""

    @property
    def psd_binds(self) -> bool:
        """Whether Λ ⪰ 0 holds an eigenvalue at zero: the fit is not the unconstrained one."""
        free = self.unconstrained
        return self.psd and free is not None and free.strengths != self.strengths

    @cached_property
    def error_bars(self) -> dict[str, ErrorBars]:
        """Error bars by kind: those that the equations determine, and those that were added.

        Where Λ ⪰ 0 binds, the equations determine none: no covariance describes a boundary.
        """
        strengths = torch.tensor(list(self.strengths.values()), dtype=torch.float64)
        by_kind = {}
        if not self.psd_binds:
            by_kind = error_bars_from(self.equations, strengths, nonnegative=self.nonnegative)
        by_kind |= {bars.kind: bars for bars in self.added_error_bars}
        return {kind: by_kind[kind] for kind in KINDS if kind in by_kind}

    @cached_property
    def unique(self) -> dict[str, float]:
        """How much `explained` falls when a regularizer is left out."""
        return unique_shares(self)

    @property
    def standard_errors(self) -> dict[str, dict[str, float]]:
        """Standard errors by kind, then by regularizer, as in ["draws"]["l2"]."""
        return {kind: bars.standard_errors for kind, bars in self.error_bars.items()}

    def intervals(self, level: float = 0.95) -> dict[str, dict[str, tuple[float, float]]]:
        """Two-sided intervals by kind of error bar, then by regularizer."""
        return {k: bars.intervals(self.strengths, level) for k, bars in self.error_bars.items()}

    def with_error_bars(self, bars: ErrorBars, *problems: Problem) -> "Fit":
        """The same fit with error bars of one more kind, and the problems that come with them.

        Where their noise accounts for all that the fit leaves unexplained, and that is less than
        half of the target, it is no longer reported as unexplained.
        """
        if not isinstance(bars, ErrorBars) or bars.names != tuple(self.strengths):
            got = bars.names if isinstance(bars, ErrorBars) else type(bars).__name__
            raise InputError(
                f"error bars of {got} for a fit of {tuple(self.strengths)}: pass those of the "
                "same regularizers, as score_examples(fit, …).error_bars() gives."
            )
        others = tuple(added for added in self.added_error_bars if added.kind != bars.kind)
        # New error bars of sampling replace the earlier statement about sampling noise.
        replaced = bars.kind == "sampling" and len(others) < len(self.added_error_bars)
        remaining = [p for p in self.problems if not (replaced and p.kind == ProblemKind.NOISY)]
        if bars.explains_residual and self.explained >= MIN_EXPLAINED:
            remaining = [p for p in remaining if p.kind != ProblemKind.UNEXPLAINED]
        gravity = {str(kind): place for place, kind in enumerate(ProblemKind)}
        ordered = sorted((*remaining, *problems), key=lambda p: gravity.get(p.kind, len(gravity)))
        return replace(self, added_error_bars=(*others, bars), problems=tuple(ordered))

    def with_halved(self, halved: "Fit | None" = None) -> "Fit":
        """The same fit with the fit at half the step size, or at half the scale of a technique.

        Where steps are compared with a flow (`rk4`), strengths have an error of the first order in
        the step size, which no error bar holds; `step_errors` then estimates it. Pass the fit of
        `Trajectory.halved`. For the difference of a technique with a scale (`tacit.techniques`),
        without an argument, the technique is evaluated again at half its scale, with the same
        candidates and seeds: the law of a penalty holds for small scales.
        """
        if halved is None:
            halved = fit(halved_equations(self), nonnegative=self.nonnegative, psd=self.psd)
        check_halved(self, halved)
        return replace(self, halved=halved)

    @cached_property
    def step_errors(self) -> dict[str, float]:
        """What the finite step size or scale changes in each strength; empty if not known.

        Twice the distance to the strength at half the step. A strength that halves with the step,
        as that of `gradient_norm`, is compared with twice that. For a technique of noise, whose
        effect grows with σ², 4/3 of the distance to four times the strength at half the scale.
        """
        return {} if self.halved is None else step_errors(self, self.halved.strengths)

    @cached_property
    def layers(self) -> dict[str, "Fit"]:
        """The same fit for each layer, without the columns that are zero there."""
        parts = {label: self.equations.layer(label) for label in self.equations.layers}
        if self.psd and any(
            len(cones_of(p)) < len(cones_of(self.equations)) for p in parts.values()
        ):
            raise InputError(
                "the fit is under Λ ⪰ 0, and a single layer has not all entries of Λ: look at the "
                "layers of the free fit, fit.unconstrained.layers."
            )
        return {
            label: fit(part, nonnegative=self.nonnegative, psd=self.psd)
            for label, part in parts.items()
            if part.names
        }

    def matrix(self) -> Tensor:
        """Λ of θᵀΛθ if a diagonal or symmetric family was fitted, in float64."""
        matrices = list(self.equations.matrices(list(self.strengths.values())))
        if len(matrices) != 1:
            names = ", ".join(family.name for family in self.equations.families)
            raise InputError(
                f"matrix() needs exactly one diagonal() or symmetric() family; this fit has "
                f"{len(matrices)} among: {names}."
            )
        kind, coefficients = matrices[0]
        return quadratic_matrix(torch.tensor(coefficients, dtype=torch.float64), kind)

    def curve(self, name: str = "", *, grid: Sequence[float] | None = None) -> Curve:
        """The shape of a penalty of single weights or singular values: s and s′ with their bands.

        For `spline` and `spectral_spline`, and, while the equations are in memory, for families of
        one strength such as `l2`, `smooth_l1`, `power` and `hypentropy`.

        Args:
            name: the regularizer; by default the only one that has a curve.
            grid: the points; by default the knots and points at equal distances between them.
        """
        return curve_of(self, name, grid)

    def summary(self, format: Format = "text") -> str:
        """A regression table with its problems, ready to print.

        Args:
            format: "text", "markdown", "latex" (with the package booktabs), or "html".
        """
        return render(summarize(self), format)

    def _repr_html_(self) -> str:
        return self.summary("html")

    def to_frame(self, by: By = "strength") -> "DataFrame":
        """The strengths as a DataFrame of pandas, one row each; or one row per layer and strength.

        `name`, `regularizer`, `strength`, `share`, `unique_share` (how much `explained` falls
        without the regularizer; of a family with several strengths, as a whole), `inflation`, for
        every kind of error bars `…_error` and `…_low` and `…_high`, the ends of the 95 % interval,
        and `verdict`: the gravest problem that concerns the strength, else "above zero", "below
        zero" or "around zero" by the widest interval (without `layers`), or "no interval".

        By layer, all of these are of the fit of that layer (`Fit.layers`), after `layer`,
        `target_share` (the layer's part of the squared target) and `explained`.

        Trap: `layers_low` and `layers_high` say how far layers disagree, not how precisely a
        strength is known.

        Args:
            by: "strength" or "layer".
        """
        check_choice("by", by, get_args(By))
        return make_frame(strength_rows(self) if by == "strength" else layer_rows(self), "verdict")

    def plot(self, kind: PlotKind = "strengths") -> "Figure":
        """The fit as a matplotlib Figure, as wide as a column of a paper.

        `fit.plot().savefig("figure.pdf")` is ready for print, whatever the user's settings of
        matplotlib are.

        Args:
            kind: "strengths", with their 95 % intervals; "gradients", the target against the fitted
                Σ λ_k ∇R_k, one dot per parameter, of endpoints and differences while the objective
                is in memory (this takes the passes over the data that the equations took); or
                "layers", what every regularizer explains in the fit of each layer.
        """
        return draw_fit(self, kind)

    @property
    def __maketables_coef_table__(self) -> "DataFrame":
        """The coefficients for `maketables.ETable([fit, …])`; see `coefficient_rows`."""
        rows = [{"Coefficient": name, **row} for name, row in coefficient_rows(self).items()]
        return make_frame(rows).set_index("Coefficient")

    def __maketables_stat__(self, key: str) -> float | int | None:
        """For maketables: "N" examples, "r2" (explained), "problems", or a number of the fit."""
        return regression_statistic(self, key)

    @property
    def __maketables_depvar__(self) -> str:
        return " + ".join(sorted({TARGETS[source.mode] for source in self.sources}))

    @property
    def __maketables_default_stat_keys__(self) -> list[str]:
        return ["N", "rows", "r2", "problems"]

    @property
    def __maketables_stat_labels__(self) -> dict[str, str]:
        return {"N": "Examples", "rows": "Equations", "r2": "Explained", "problems": "Problems"}

    def difference(self, other: "Fit") -> FitDifference:
        """This fit's strengths minus another's, with error bars, and whether chance explains them.

        For two recipes (or models, or seeds), each with a fit of its own. For every kind of error
        bars that both have, `layers` apart, variances add up:

            SE² = SE₁² + SE₂²,   t = (λ̂₁ − λ̂₂)/SE,

        with the degrees of freedom of Welch and Satterthwaite, (v₁ + v₂)²/(v₁²/f₁ + v₂²/f₂). What
        is not compared, and problems of the fits that hide a strength, are in its `problems`.

        Trap: variances add up only for independent fits. Runs from the same initial weights, with
        the same batches, or on the same examples (kind "sampling") are correlated, as a rule
        positively: differences then look more like chance than they are. Fits of the same weights
        and data are refused.

        Trap: "training" from the epochs of one run does not contain what differs between runs.
        To compare recipes rather than two runs of them, stack fits of several seeds each.
        """
        return difference_of(self, other)

    def to_metrics(self, prefix: str = "tacit/") -> dict[str, float]:
        """Finite plain floats for a logger along training, as in `wandb.log(fit.to_metrics())`.

        `explained`, `problems` (their number), and for every regularizer `strength/…`,
        `standard_error/…`, and `low/…` and `high/…`, the ends of its 95 % interval. Names have only
        letters, digits, underscores and slashes: `l2[0.weight]` is `strength/l2_0_weight`, and of
        names that become equal the second gets `_2`, in the order of `strengths`.

        The interval is the one kind that is widest for this strength (`layers` left out), so that
        no movement of a curve within it is taken for a change: fits along one run can differ by the
        noise of training and by the choice of examples. Numbers that are not finite are left out,
        and so are intervals of strengths that are not determined.

        Args:
            prefix: before every name; parts that end in one slash.
        """
        return metrics_of(self, prefix)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON; infinite numbers become None."""
        separate = ("equations", "unconstrained", "problems", "sources", "added_error_bars")
        separate += ("halved",)
        plain = {n: getattr(self, n) for n in self.__dataclass_fields__ if n not in separate}
        plain["problems"] = [asdict(problem) for problem in self.problems]
        plain["sources"] = [asdict(source) for source in self.sources]
        plain["standard_errors"], plain["intervals"] = self.standard_errors, self.intervals()
        plain["step_errors"] = self.step_errors
        free = self.unconstrained
        plain["unconstrained"] = None if free is None else free.to_dict()
        return jsonable(plain)

    def __str__(self) -> str:
        return self.summary()


def fit(equations: Equations, *, nonnegative: bool = False, psd: bool = False) -> Fit:
    """Least-squares strengths: min ‖design·λ − target‖², exactly, or under λ ≥ 0 or Λ ⪰ 0.

    The rank is decided on columns of unit norm. If columns are dependent, the answer is the one of
    least norm in the strengths themselves (under Λ ⪰ 0, of small norm), and a Problem says so.

    Args:
        equations: what to fit.
        nonnegative: fit under λ ≥ 0.
        psd: fit under Λ ⪰ 0 for the matrix Λ of every `symmetric()`, as that of early stopping is;
            the strengths of other regularizers are free. Where the unconstrained Λ is positive
            semidefinite, it is the answer.
    """
    rows = check_arguments(equations, nonnegative, psd)
    factor, count = equations.factor(), len(equations.names)
    check_scale(equations.names, factor)
    system, targets = System(factor[:, :count]), factor[:, count:]
    solve = solver(system, equations, nonnegative=nonnegative, psd=psd)
    target = targets.mean(1)
    strengths = solve(target[:, None])[:, 0]
    constrained = psd or bool(equations.bounded(nonnegative=nonnegative).any())
    unconstrained = fit(_without_bounds(equations)) if constrained else None
    shares = _shares(system.design, solve(targets), targets)
    fitted = system.design @ strengths
    residual = (target - fitted).norm()
    residual_ratio, matching_loss = _ratio(residual, target.norm()), float(residual) ** 2 / rows
    cosine = _ratio(fitted @ target, fitted.norm() * target.norm())
    products, ratio_with_noise = products_of_points(equations), residual_ratio
    if products is not None:
        shares, residual_ratio, cosine = _net_of_noise(products, strengths)
        matching_loss = residual_ratio**2 * max(0.0, float(products[-1, -1])) / rows
    explained = float(shares.sum())
    evidence = gather_evidence(
        equations,
        system,
        targets,
        strengths,
        explained,
        ratio_with_noise,
        nonnegative=nonnegative,
        psd=psd,
    )

    def by_name(values: Tensor) -> dict[str, float]:
        return dict(zip(equations.names, values.tolist(), strict=True))

    return Fit(
        strengths=by_name(strengths),
        explained=explained,
        shares=by_name(shares),
        cosine=cosine,
        residual_ratio=residual_ratio,
        matching_loss=matching_loss,
        condition=system.condition,
        inflation=by_name(system.inflation),
        gradient_norm=_root_mean_square([s.gradient_norm for s in equations.sources]),
        rank=system.rank,
        rows=rows,
        problems=diagnose(evidence),
        findings=tuple(findings(evidence)),
        nonnegative=nonnegative,
        sources=equations.sources,
        unconstrained=unconstrained,
        equations=equations,
        psd=psd,
    )


def _without_bounds(equations: Equations) -> Equations:
    """The same equations without bounds that families have by themselves; no curve is left then."""
    families = [replace(f, bounded=(), shape=None) if f.bounded else f for f in equations.families]
    return replace(equations, families=tuple(families))


def _shares(design: Tensor, strengths: Tensor, targets: Tensor) -> Tensor:
    """⟨λ_k φ_k, target⟩ / ‖target‖² of each column; they sum to the explained fraction.

    With independent groups of draws, the strengths of one group are combined with the target of
    another: their noise is independent, so it cancels from both inner products on average.
    """
    groups = targets.shape[1]
    pairs = torch.ones(groups, groups) if groups == 1 else 1 - torch.eye(groups)
    inner, pairs = design.T @ targets, pairs.to(targets)
    parts = (strengths @ pairs * inner).sum(1)
    whole = between_groups(targets, targets)
    return parts / whole if whole > 0 else torch.zeros_like(parts)


def _net_of_noise(products: Tensor, strengths: Tensor) -> tuple[Tensor, float, float]:
    """Shares, residual ratio and cosine from products of different points, without their noise."""
    whole = products[-1, -1].clamp_min(0)
    residual = torch.cat([-strengths, torch.ones(1, dtype=torch.float64)])
    rest = (residual @ products @ residual).clamp_min(0)
    fitted = (strengths @ products[:-1, :-1] @ strengths).clamp_min(0)
    cosine = _ratio(strengths @ products[:-1, -1], (fitted * whole).sqrt())
    ratio = _ratio(rest.sqrt(), whole.sqrt()) if whole else 1.0
    return net_shares(products, strengths), ratio, max(-1.0, min(cosine, 1.0))


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if whole else 0.0


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))
