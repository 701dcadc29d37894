"""Sets of regularizers compared by how well they predict equations that they were not fitted to.

Information criteria such as AIC and BIC count every parameter as an independent observation, which
parameters are not. Here a whole cluster of them is held out: a layer, an endpoint or a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tacit.equations.blocks import Block
from tacit.equations.equations import Equations
from tacit.equations.factors import running_factors
from tacit.errors import InputError, check_choice
from tacit.fitting.column_noise import PartNoise, noise_by_label
from tacit.fitting.fits import Fit
from tacit.fitting.shares import columns_of, equations_of
from tacit.fitting.solving import System, between_groups, explained

ClusterKind = Literal["layers", "endpoints", "steps"]


class Difference(NamedTuple):
    """How much more one model explains than another, with a standard error."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Comparison:
    """How much each model explains of clusters that it was not fitted to, in plain floats."""

    held_out: ClusterKind
    clusters: tuple[str, ...]
    models: Mapping[str, tuple[str, ...]]
    """The columns of each model."""
    fitted: Mapping[str, float]
    """The fraction that each model explains of all clusters when fitted to all of them."""
    square_norms: tuple[float, ...] = field(repr=False)
    """‖target‖² of each cluster."""
    square_residuals: Mapping[str, tuple[float, ...]] = field(repr=False)
    """‖target − design·λ‖² of each cluster by model, with λ fitted to the other clusters."""

    @property
    def explained(self) -> dict[str, float]:
        """1 − Σ‖residual‖²/Σ‖target‖² of each model; negative where it is worse than λ = 0."""
        total = sum(self.square_norms)
        return {name: _fraction(sum(r), total) for name, r in self.square_residuals.items()}

    @property
    def by_cluster(self) -> dict[str, dict[str, float]]:
        """The same for each cluster, by model and cluster."""
        by_model = {}
        for name, residuals in self.square_residuals.items():
            fractions = map(_fraction, residuals, self.square_norms)
            by_model[name] = dict(zip(self.clusters, fractions, strict=True))
        return by_model

    @property
    def best(self) -> str:
        """The model that explains most of what was held out; the smallest, if several are equal."""
        sizes = {name: len(columns) for name, columns in self.models.items()}
        return max(self.models, key=lambda name: (round(self.explained[name], 12), -sizes[name]))

    def difference(self, model: str, other: str) -> Difference:
        """How much more of what was held out one model explains than another.

        The standard error is the jackknife's over clusters: the spread of the pooled difference
        when each cluster is left out of it in turn.

        Trap: fits that share all clusters but one are similar, which the jackknife ignores. With
        few clusters the standard error is a lower bound.
        """
        residuals = self.square_residuals
        for name in (model, other):
            if name not in residuals:
                raise InputError(f"no model {name!r}: there are {', '.join(residuals)}.")
        gains = [b - a for a, b in zip(residuals[model], residuals[other], strict=True)]
        gain, total, count = sum(gains), sum(self.square_norms), len(gains)
        if total <= 0:
            return Difference(0.0, 0.0)
        left_out = [
            (gain - cluster_gain) / (total - norm) if total > norm else gain / total
            for cluster_gain, norm in zip(gains, self.square_norms, strict=True)
        ]
        mean = sum(left_out) / count
        variance = sum((value - mean) ** 2 for value in left_out) * (count - 1) / count
        return Difference(gain / total, variance**0.5)

    def summary(self) -> str:
        """A table with one row per model, the best first, each with its distance to the best."""
        width = max(5, *(len(name) for name in self.models))
        lines = [
            f"explained of held-out {self.held_out} ({len(self.clusters)})",
            f"{'model':<{width}}{'strengths':>11}{'held out':>10}{'fitted':>9}   behind the best",
        ]
        for name in sorted(self.models, key=lambda n: (n != self.best, -self.explained[n])):
            behind = self.difference(self.best, name)
            text = f"{behind.value:.4f} ± {behind.standard_error:.4f}"
            lines.append(
                f"{name:<{width}}{len(self.models[name]):>11}{self.explained[name]:>10.4f}"
                f"{self.fitted[name]:>9.4f}   {'–' if name == self.best else text}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()


def compare(
    equations: Equations | Fit,
    models: Mapping[str, Sequence[str]],
    *,
    held_out: ClusterKind = "layers",
) -> Comparison:
    """How much of each layer, endpoint or step models explain when fitted to all the others.

    The score is 1 − ‖target − design·λ̂‖²/‖target‖² on the cluster that is held out, with λ̂ fitted
    to all other clusters, pooled over clusters. A larger model does not win by its size, as it does
    on the clusters it was fitted to. With several groups of draws, residuals of different groups
    are multiplied, so that the noise of the draws cancels on average.

    Trap: a column that is zero in all other clusters has no estimate there and counts as zero.
    Strengths of `layerwise()` therefore predict nothing of a layer that is held out; compare them
    over endpoints or steps.

    Args:
        equations: the equations of all regularizers that any model has, or a fit of them.
        models: for each model, a list of names of columns or of whole families.
        held_out: "layers", "endpoints" (of `stack`) or "steps" (of trajectories).
    """
    equations, nonnegative, _ = equations_of(equations, "compare")
    if not isinstance(models, Mapping) or not models:
        raise InputError(
            f"models is {models!r}: pass a dictionary from name to regularizers, as in "
            "{'ridge': ['l2'], 'both': ['l2', 'l1']}."
        )
    count, whole = len(equations.names), equations.factor()
    bounded = equations.bounded(nonnegative=nonnegative)
    clusters = _cluster_factors(equations, held_out)
    factors = list(clusters.values())
    # The factor of all clusters but one, from running factors of both ends: linear in the clusters.
    before, after = running_factors(factors), running_factors(factors[::-1])[::-1]
    without = [torch.cat(both) for both in zip(before, after, strict=True)]
    noise = noise_by_label(equations, _cluster_labels(equations, held_out), skip_empty=False)
    if noise is not None:
        without = list(noise.without_one.correct(without, equations.targets))
    names, fitted, square_residuals = {}, {}, {}
    for model, regularizers in models.items():
        columns = list(columns_of(equations, regularizers, what=f"model {model!r}"))
        strengths = _strengths(whole, columns, count, bounded)
        from_others = [_strengths(others, columns, count, bounded) for others in without]
        squares = [
            between_groups(residual, residual)
            for factor, found in zip(factors, from_others, strict=True)
            for residual in [factor[:, count:] - factor[:, columns] @ found]
        ]
        if noise is not None:
            squares = _without_noise(squares, noise, columns, from_others)
        names[str(model)] = tuple(equations.names[c] for c in columns)
        fitted[str(model)] = explained(whole[:, columns], strengths, whole[:, count:])
        square_residuals[str(model)] = tuple(squares)
    norms = tuple(between_groups(factor[:, count:], factor[:, count:]) for factor in factors)
    return Comparison(held_out, tuple(clusters), names, fitted, norms, square_residuals)


def _strengths(factor: Tensor, columns: list[int], count: int, bounded: Tensor) -> Tensor:
    return System(factor[:, columns]).solve_bounded(factor[:, count:], bounded[columns])


def _without_noise(
    squares: Sequence[float], noise: PartNoise, columns: list[int], strengths: Sequence[Tensor]
) -> list[float]:
    """Squared residuals of clusters, less what noise of columns from random probes adds to them."""
    chosen = [i for i, column in enumerate(noise.noisy) if column in columns]
    places = [columns.index(noise.noisy[i]) for i in chosen]
    return [
        square - between_groups(found[places], matrix[chosen][:, chosen] @ found[places])
        for square, matrix, found in zip(squares, noise.noises, strengths, strict=True)
    ]


def _cluster_labels(equations: Equations, held_out: str) -> list[str]:
    """The cluster of every block."""
    several_sources = len(equations.sources) > 1

    def label(block: Block) -> str:
        step = f"{block.source}.{block.step}" if several_sources else str(block.step)
        return {"layers": block.layer, "endpoints": str(block.source), "steps": step}[held_out]

    return [label(block) for block in equations.blocks]


def _cluster_factors(equations: Equations, held_out: str) -> dict[str, Tensor]:
    """The triangular factor of each cluster, by label."""
    check_choice("held_out", held_out, get_args(ClusterKind))
    blocks: dict[str, list[Block]] = {}
    for label, block in zip(_cluster_labels(equations, held_out), equations.blocks, strict=True):
        blocks.setdefault(label, []).append(block)
    if len(blocks) < 2:
        remedies = {
            "layers": "compare over endpoints (tacit.stack) or steps",
            "endpoints": "stack the equations of several (tacit.stack), or compare over layers",
            "steps": "record a trajectory of several steps, or compare over layers",
        }
        raise InputError(
            f"{held_out} cannot be held out, as there is only one ({next(iter(blocks))}): "
            f"{remedies[held_out]}."
        )
    parts = {label: replace(equations, blocks=tuple(part)) for label, part in blocks.items()}
    return {label: part.noisy_factor() for label, part in parts.items()}


def _fraction(square_residual: float, square_norm: float) -> float:
    return 1 - square_residual / square_norm if square_norm > 0 else 0.0
