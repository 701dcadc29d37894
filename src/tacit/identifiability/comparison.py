"""Sets of regularizers compared by what they predict where they were not fitted.

Parameters are not independent draws, so likelihoods and their criteria, which count each as one,
do not apply. What is held out here is a whole cluster: a layer, an endpoint, a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tacit.equations.equations import Block, Equations, triangular_factor
from tacit.errors import InputError
from tacit.fitting.shares import columns_of, equations_of
from tacit.fitting.solving import System, explained, paired

if TYPE_CHECKING:
    from tacit.fitting.fits import Fit

Cluster = Literal["layers", "endpoints", "steps"]


class Difference(NamedTuple):
    """How much more one model explains than another, with a standard error."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Comparison:
    """What each model explains of clusters that it was not fitted to. All numbers are floats."""

    held_out: Cluster
    clusters: tuple[str, ...]
    models: Mapping[str, tuple[str, ...]]
    """The columns of each model."""
    fitted: Mapping[str, float]
    """What each model explains of all clusters when fitted to all of them."""
    norms: tuple[float, ...] = field(repr=False)
    """‖target‖² of each cluster."""
    left: Mapping[str, tuple[float, ...]] = field(repr=False)
    """‖target − design·λ‖² of each cluster, λ fitted to the others."""

    @property
    def explained(self) -> dict[str, float]:
        """1 − Σ left / Σ ‖target‖² of each; below zero where it predicts worse than nothing."""
        whole = sum(self.norms)
        return {name: _rest(sum(left), whole) for name, left in self.left.items()}

    @property
    def by_cluster(self) -> dict[str, dict[str, float]]:
        """The same for each cluster, by model and cluster."""
        return {
            name: {
                c: _rest(*part) for c, *part in zip(self.clusters, left, self.norms, strict=True)
            }
            for name, left in self.left.items()
        }

    @property
    def best(self) -> str:
        """The model that explains most of what was held out; of equals the smallest."""
        sizes = {name: len(columns) for name, columns in self.models.items()}
        return max(self.models, key=lambda name: (round(self.explained[name], 12), -sizes[name]))

    def difference(self, model: str, other: str) -> Difference:
        """How much more of what was held out one model explains than another.

        The standard error is the jackknife's over clusters: the spread of the pooled difference
        when each cluster's part in it is left out in turn. Fits that share all clusters but one
        are alike, which it does not see: with few clusters read it as a lower bound.
        """
        for name in (model, other):
            if name not in self.left:
                raise InputError(f"no model {name!r}: there are {', '.join(self.left)}.")
        gains = [b - a for a, b in zip(self.left[model], self.left[other], strict=True)]
        gain, whole, count = sum(gains), sum(self.norms), len(gains)
        if whole <= 0:
            return Difference(0.0, 0.0)
        without = [
            (gain - own) / (whole - norm) if whole > norm else gain / whole
            for own, norm in zip(gains, self.norms, strict=True)
        ]
        mean = sum(without) / count
        spread = sum((value - mean) ** 2 for value in without) * (count - 1) / count
        return Difference(gain / whole, spread**0.5)

    def summary(self) -> str:
        """A table: one row a model, the best first, each with its distance to the best."""
        width = max(5, *(len(name) for name in self.models))
        head = f"{'model':<{width}}{'strengths':>11}{'held out':>10}{'fitted':>9}   behind the best"
        title = f"explained of held-out {self.held_out} ({len(self.clusters)})"
        order = sorted(self.models, key=lambda name: (name != self.best, -self.explained[name]))
        lines = [title, head]
        for name in order:
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
    equations: "Equations | Fit",
    models: Mapping[str, Sequence[str]],
    *,
    held_out: Cluster = "layers",
) -> Comparison:
    """How much of each layer, endpoint or step models explain when fitted to all the others.

    The score is 1 − ‖target − design·λ̂‖²/‖target‖² on the cluster held out, λ̂ fitted to the rest,
    pooled over clusters. A superset does not win by itself, as it does where it was fitted. With
    several groups of draws, what one group leaves meets what another leaves, so that the draws'
    noise cancels on average.

    A column that is zero in all other clusters has no estimate there and counts as zero: strengths
    of `layerwise()` predict nothing of a layer that was held out. Compare those over endpoints or
    steps.

    Args:
        equations: those of all regularizers that any model has, or a fit of them.
        models: names of columns, or of families as a whole, by name of the model.
        held_out: what is held out: "layers", "endpoints" (of `stack`) or "steps" (of trajectories).
    """
    equations, nonnegative = equations_of(equations, "compare")
    if not isinstance(models, Mapping) or not models:
        raise InputError(
            f"models is {models!r}: pass a dictionary from name to regularizers, as in "
            "{'ridge': ['l2'], 'both': ['l2', 'l1']}."
        )
    chosen = {
        str(name): list(columns_of(equations, columns, what=f"model {name!r}"))
        for name, columns in models.items()
    }
    count = len(equations.names)
    labels, factors = _clusters(equations, held_out)
    left: dict[str, list[float]] = {name: [] for name in chosen}
    for own, rest in zip(factors, _all_but_one(factors), strict=True):
        for name, columns in chosen.items():
            strengths = _strengths(rest, columns, count, nonnegative)
            missed = own[:, count:] - own[:, columns] @ strengths
            left[name].append(paired(missed, missed))
    whole = equations.factor()
    fitted = {
        name: explained(
            whole[:, columns], _strengths(whole, columns, count, nonnegative), whole[:, count:]
        )
        for name, columns in chosen.items()
    }
    return Comparison(
        held_out=held_out,
        clusters=labels,
        models={n: tuple(equations.names[c] for c in columns) for n, columns in chosen.items()},
        fitted=fitted,
        norms=tuple(paired(own[:, count:], own[:, count:]) for own in factors),
        left={name: tuple(values) for name, values in left.items()},
    )


def _strengths(factor: Tensor, columns: list[int], count: int, nonnegative: bool) -> Tensor:
    system, targets = System(factor[:, columns]), factor[:, count:]
    if not len(system.nonzero):
        return targets.new_zeros(len(columns), targets.shape[1])
    return system.solve_nonnegative(targets) if nonnegative else system.solve(targets)


def _clusters(equations: Equations, held_out: str) -> tuple[tuple[str, ...], list[Tensor]]:
    """Names of the clusters, and the factor of each."""
    if held_out not in get_args(Cluster):
        raise InputError(f"held_out is {held_out!r}: pass 'layers', 'endpoints' or 'steps'.")
    blocks: dict[str, list[Block]] = {}
    several = len(equations.sources) > 1
    for block in equations.blocks:
        step = f"{block.source}.{block.step}" if several else str(block.step)
        label = {"layers": block.layer, "endpoints": str(block.source), "steps": step}[held_out]
        blocks.setdefault(label, []).append(block)
    if len(blocks) < 2:
        ways = {
            "layers": "compare over endpoints (tacit.stack) or steps",
            "endpoints": "stack equations of several (tacit.stack), or compare over layers",
            "steps": "record a trajectory of several, or compare over layers",
        }
        raise InputError(
            f"{held_out} cannot be held out: there is only one here ({next(iter(blocks))}), and "
            f"nothing to fit to without it. Instead {ways[held_out]}."
        )
    factors = [replace(equations, blocks=tuple(own)).factor() for own in blocks.values()]
    return tuple(blocks), factors


def _all_but_one(factors: list[Tensor]) -> list[Tensor]:
    """For each factor, one with the inner products of all others: from both ends, so in O(n)."""
    empty = factors[0][:0]
    before, after = [empty], [empty]
    for factor in factors[:-1]:
        before.append(triangular_factor(torch.cat([before[-1], factor])))
    for factor in reversed(factors[1:]):
        after.append(triangular_factor(torch.cat([factor, after[-1]])))
    return [torch.cat([a, b]) for a, b in zip(before, reversed(after), strict=True)]


def _rest(left: float, whole: float) -> float:
    return 1 - left / whole if whole > 0 else 0.0
