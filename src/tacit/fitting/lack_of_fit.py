"""Whether a residual is more than noise and rounding."""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.equations.alternatives import WEIGHTS
from tacit.equations.blocks import Block
from tacit.equations.equations import Equations
from tacit.equations.factors import triangular_factor
from tacit.fitting.column_noise import PartNoise, noise_by_label, residuals_of_groups
from tacit.fitting.error_bars import SHARED, factors_by_label, jackknife
from tacit.fitting.evidence import LACK_OF_FIT, WELL_EXPLAINED, Evidence
from tacit.fitting.solving import System, explained

ROUNDING = 3.0
"""Residuals below this many times the rounding level are rounding."""
FEWEST_SIGNS, MOST_SIGNS = 8, 12
"""Groups whose signs are changed in all ways: with fewer, no probability is as small as 1 %."""
SKEW = 1.1
"""Factor by which a squared sum of residuals must exceed others where columns are from probes,
because their noise is not symmetric."""
GROUPS = 8
"""Groups of successive steps of a trajectory whose strengths are compared."""
MOST_LAYERS = 256
"""Layers times candidates up to which each is tried with a strength of its own."""


def lacks_fit(e: Evidence) -> bool:
    """Whether the candidates leave more unexplained than rounding and measured noise can.

    Where no noise was measured, any part that is not rounding counts: at one endpoint, in one
    epoch, in fewer than 8 steps, for a difference without groups of draws.
    """
    if e.explained >= WELL_EXPLAINED or e.underdetermined:
        return False
    if e.residual_ratio * e.target_norm <= ROUNDING * e.equations.floor:
        return False
    if e.equations.targets > 1 or (e.column_noise and group_of(e.equations) is None):
        return chance_of_residual(e) < LACK_OF_FIT
    return group_of(e.equations) is None or clearest_addition(e) is not None


def chance_of_residual(e: Evidence) -> float:
    """The probability of so large a mean residual, if it were only noise of groups.

    Groups are those of draws, or of the probes of columns. With r_g the residual of group g,
    ‖Σ ±r_g‖² has the same distribution for all signs if noise is symmetric, however its entries
    depend on each other: the probability is the part of all signs for which it is at least
    ‖Σ r_g‖². With fewer than 8 groups, which have too few signs, it is that of ‖r̄‖² over its noise
    in F(1, G−1): exact if noise has one dimension, and too large otherwise.
    """
    gram = _products_of_residuals(e)
    groups = len(gram)
    if groups < FEWEST_SIGNS:
        from scipy.special import fdtrc

        mean = gram.mean()
        noise = (gram.diagonal().sum() - groups * mean) / (groups * (groups - 1))
        return float(fdtrc(1, groups - 1, float(mean / noise))) if noise > 0 else 0.0
    signs = _signs(groups).to(gram)
    sums = ((signs @ gram) * signs).sum(1)
    least = gram.sum() / SKEW if e.column_noise else gram.sum() * (1 - 1e-9)
    return float((sums >= least).double().mean())


@cache
def _signs(groups: int) -> Tensor:
    """One row of signs per choice, the first all positive: all choices up to a common sign."""
    if groups > MOST_SIGNS:
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (2**MOST_SIGNS, groups), generator=generator)
    else:
        numbers = torch.arange(2 ** (groups - 1))
        signs = numbers[:, None] >> torch.arange(groups) & 1
    signs[0] = 0
    return 1.0 - 2.0 * signs


def _products_of_residuals(e: Evidence) -> Tensor:
    """Inner products of the residuals of groups of draws, of probes, or of both in pairs."""
    scatter = e.equations.scatter()
    if scatter is not None:
        return residuals_of_groups(e.equations, scatter, e.strengths)
    residuals = _residuals_by_group(e)
    return residuals.T @ residuals


def _residuals_by_group(e: Evidence) -> Tensor:
    """The residual of each group of draws, with the mean of the fit."""
    factor, count = e.equations.factor(), len(e.equations.names)
    design, targets = factor[:, :count], factor[:, count:]
    deviations = targets - targets.mean(1, keepdim=True)
    noise = deviations - design @ e.system.solve(deviations)
    return noise + (targets.mean(1) - design @ e.strengths)[:, None]


class Addition(NamedTuple):
    """One more column beside the candidates of a fit."""

    before: str
    """What is said of it before its strength."""
    after: str
    factors: Tensor
    """[candidates | column | target] of every group of equations."""
    noise: PartNoise | None
    """Of columns from random probes."""


def clearest_addition(e: Evidence) -> str | None:
    """The further column that epochs, or groups of steps, agree on most clearly, in words.

    Its strength beside the candidates differs from zero by a t test at 1 %, divided among all
    columns that are tried, with the error bars of epochs; and it explains a part that is not
    negligible. Tried are other families and scopes, and a strength of its own for every layer.
    """
    from scipy.special import stdtr

    group = group_of(e.equations)
    if group is None:
        return None
    added = [*_other_families(e, group), *_other_layers(e, group)]
    best, least = None, LACK_OF_FIT / max(len(added), 1)
    for said_before, said_after, factors, noise in added:
        whole = triangular_factor(factors.flatten(0, 1))
        whole = whole if noise is None else noise.whole.correct([whole])[0]
        design, target = whole[:, :-1], whole[:, -1:]
        strengths = System(design).solve(target)
        part = explained(design, strengths, target)
        before = explained(design[:, :-1], System(design[:, :-1]).solve(target), target)
        names = [str(i) for i in range(design.shape[1])]
        bars = jackknife(factors, names, kind="training", basis="", noise=noise)
        if bars is None or part - before <= (1 - WELL_EXPLAINED) * part:
            continue
        first = e.equations.sources[0]
        shared = SHARED * len(factors) if first.epoch and not first.sampled else 0.0
        variance = float(bars.covariance[-1, -1]) * (1 + shared)
        strength = float(strengths[-1])
        ratio = abs(strength) / max(variance, 1e-300) ** 0.5
        freedom = bars.freedoms[-1] if bars.freedoms else bars.freedom
        probability = 2 * float(stdtr(freedom, -ratio))
        if probability < least:
            clearly = f"{ratio:.0f}" if ratio < 1000 else "over 1000"
            best = f"{said_before} {strength:.2g}, {clearly} standard errors{said_after}"
            least = probability
    return best


def group_of(equations: Equations) -> Callable[[Block], int] | None:
    """The group of a block, where noise shows as disagreement: epochs and runs, or steps."""
    sources = equations.sources
    if not any(source.mode == "trajectory" for source in sources):
        return None
    if len(sources) > 1:
        return lambda block: block.source
    (steps,) = (source.steps for source in sources)
    return (lambda block: block.step * GROUPS // steps) if steps >= GROUPS else None


def _other_families(e: Evidence, group: Callable[[Block], int]) -> Iterator[Addition]:
    """Families that need only the weights, on all parameters or on weights only."""
    others, count = alternatives_of(e.equations), len(e.equations.names)
    if others is None:
        return
    labels = [(group(b), b.layer) for b in others.blocks]
    parts, noise = factors_by_label(others, labels), noise_by_label(others, labels)
    kinds = {kind for _, kind in parts}
    for column, call in list(enumerate(others.names))[count:]:
        scopes = {call: kinds}
        if len(kinds) > 1:
            scopes[on_weights(call)] = {WEIGHTS}
        for text, covered in scopes.items():
            factors = _add_column(parts, column, covered, count)
            added = _add_noise(parts, noise, column, covered, count)
            yield Addition(f"Beside them, {text} has the strength", " from zero.", factors, added)


def _other_layers(e: Evidence, group: Callable[[Block], int]) -> Iterator[Addition]:
    """The candidates, each with a strength of its own in one layer."""
    names, layers = e.equations.names, e.equations.layers
    if not 1 < len(layers) * len(names) <= MOST_LAYERS:
        return
    labels = [(group(b), b.layer) for b in e.equations.blocks]
    parts, noise = factors_by_label(e.equations, labels), noise_by_label(e.equations, labels)
    for layer in layers if len(layers) > 1 else ():
        for column, name in enumerate(names):
            text = f"The strength of {name} in layer {layer} differs from that in others by"
            factors = _add_column(parts, column, {layer}, len(names))
            added = _add_noise(parts, noise, column, {layer}, len(names))
            yield Addition(text, ": try layerwise.", factors, added)


def _add_column(
    parts: dict[tuple[int, str], Tensor], column: int, covered: Container[str], count: int
) -> Tensor:
    """[candidates | column on the covered parts | target] of every group."""
    groups: dict[int, list[Tensor]] = {}
    for (group, part), factor in parts.items():
        added = factor[:, column, None] * float(part in covered)
        rows = torch.cat([factor[:, :count], added, factor[:, -1:]], dim=1)
        groups.setdefault(group, []).append(rows)
    factors = [triangular_factor(torch.cat(rows)) for rows in groups.values()]
    height = max(map(len, factors))
    return torch.stack([F.pad(factor, (0, 0, 0, height - len(factor))) for factor in factors])


def _add_noise(
    parts: Iterable[tuple[int, str]],
    noise: PartNoise | None,
    column: int,
    covered: Container[str],
    count: int,
) -> PartNoise | None:
    """The noise of [candidates | column on the covered parts] of every group."""
    if noise is None:
        return None
    inside = outside = torch.eye(len(noise.noisy), dtype=torch.float64)
    noisy = noise.noisy
    if column in noisy:
        added = inside[:, noisy.index(column), None]
        inside, outside = torch.cat([inside, added], 1), torch.cat([outside, 0 * added], 1)
        noisy = (*noisy, count)
    groups: dict[int, Tensor] = {}
    for (group, part), matrix in zip(parts, noise.noises, strict=True):
        chosen = inside if part in covered else outside
        groups[group] = groups.get(group, 0) + chosen.T @ matrix @ chosen
    return PartNoise(noisy, torch.stack(list(groups.values())))


def alternatives_of(equations: Equations) -> Equations | None:
    """The equations with the columns of other families; None where there are none."""
    if not equations.alternatives:
        return None
    names = (*equations.names, *equations.other_families)
    return replace(equations, names=names, blocks=equations.alternatives)


def on_weights(call: str) -> str:
    """A call with the scope of matrices: `l1(scope=tacit.matrices)`."""
    return f"{call[:-1]}{'' if call.endswith('()') else ', '}scope=tacit.matrices)"
