"""Whether a residual is more than noise, where it lies, and which candidates would explain it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.equations.alternatives import BIASES, WEIGHTS
from tacit.equations.equations import Equations
from tacit.fitting.error_bars import SHARED, jackknife
from tacit.fitting.evidence import LACK_OF_FIT, WELL_EXPLAINED, Evidence
from tacit.fitting.solving import System, between_groups, explained
from tacit.objective.params import shorten

ROUNDING = 3.0
"""Residuals below this many times the rounding level are rounding."""
FEWEST_SIGNS, MOST_SIGNS = 8, 12
"""Groups whose signs are changed in all ways: with fewer, no probability is as small as 1 %."""
HELPS, CLOSES, SAME = 0.5, 0.1, 0.9
"""Parts of what is unexplained that an alternative may leave to be named at all; of what is left by
the best one of fewer strengths; and of what is left by one of as many."""


def lacks_fit(e: Evidence) -> bool:
    """Whether the candidates leave more unexplained than rounding and measured noise can."""
    if e.explained >= WELL_EXPLAINED or e.underdetermined:
        return False
    if all(source.epoch for source in e.equations.sources):
        return added_column(e) is not None
    if any(source.mode == "trajectory" for source in e.equations.sources):
        return False  # one trajectory does not tell the noise of its steps from what is missing
    if e.residual_ratio * e.target_norm <= ROUNDING * e.equations.floor:
        return False
    return e.equations.targets == 1 or chance_of_residual(e) < LACK_OF_FIT


def chance_of_residual(e: Evidence) -> float:
    """The probability of so large a mean residual, if it were only noise of the groups of draws.

    With r_g the residual of group g, ‖Σ ±r_g‖² has the same distribution for all signs if noise is
    symmetric, however its entries depend on each other: the probability is the part of all signs
    for which it is at least ‖Σ r_g‖². With fewer than 8 groups, which have too few signs, it is
    that of ‖r̄‖² over its noise in F(1, G−1): exact if noise has one dimension, and too large
    otherwise.
    """
    residuals = _residuals_by_group(e)
    groups = residuals.shape[1]
    if groups < FEWEST_SIGNS:
        from scipy.special import fdtrc

        mean = residuals.mean(1)
        noise = (residuals - mean[:, None]).square().sum() / (groups * (groups - 1))
        return float(fdtrc(1, groups - 1, float(mean.square().sum() / noise))) if noise else 0.0
    gram = residuals.T @ residuals
    signs = _signs(groups).to(gram)
    sums = ((signs @ gram) * signs).sum(1)
    return float((sums >= gram.sum() * (1 - 1e-9)).double().mean())


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


def _residuals_by_group(e: Evidence) -> Tensor:
    """The residual of each group of draws, with the mean of the fit."""
    factor, count = e.equations.factor(), len(e.equations.names)
    design, targets = factor[:, :count], factor[:, count:]
    deviations = targets - targets.mean(1, keepdim=True)
    noise = deviations - design @ e.system.solve(deviations)
    return noise + (targets.mean(1) - design @ e.strengths)[:, None]


class Alternative(NamedTuple):
    """Candidates that are compared with those of a fit: a column, and the blocks it covers."""

    text: str
    columns: tuple[tuple[int, tuple[str, ...]], ...]


def describe_residual(e: Evidence) -> str:
    """Sentences: where the residual lies, and which candidates would explain it."""
    return "".join(f" {sentence}" for sentence in (*_places(e), *_explanations(e)))


def _places(e: Evidence) -> Iterator[str]:
    """In which layers the residual lies, and how much of it in biases and norms."""
    by_layer = _residual_by_layer(e.equations, e.strengths)
    if len(by_layer) > 1:
        largest = sorted(by_layer, key=lambda layer: -by_layer[layer])[:3]
        shown = ", ".join(f"{by_layer[layer]:.0%} in layer {layer}" for layer in largest)
        yield f"The rest lies {shown}."
    others = _alternatives(e)
    if others is None or {block.layer for block in others.blocks} != {WEIGHTS, BIASES}:
        return
    strengths = torch.zeros(len(others.names), dtype=torch.float64)
    strengths[: len(e.strengths)] = e.strengths
    part = _residual_by_layer(others, strengths)[BIASES]
    rows = sum(block.rows for block in others.blocks if block.layer == BIASES)
    rows_part = rows / sum(block.rows for block in others.blocks)
    yield f"Biases and norms, {rows_part:.0%} of the rows, have {part:.0%} of the rest."


def _residual_by_layer(equations: Equations, strengths: Tensor) -> dict[str, float]:
    """The part of the squared residual in each layer; without the noise of groups of draws."""
    squares: dict[str, float] = {}
    for block in equations.blocks:
        count = len(block.columns)
        fitted = block.factor[:, :count] @ strengths[list(block.columns)]
        residual = block.factor[:, count:] - fitted[:, None]
        square = max(0.0, between_groups(residual, residual))
        squares[block.layer] = squares.get(block.layer, 0.0) + square
    total = sum(squares.values())
    return {layer: square / total if total else 0.0 for layer, square in squares.items()}


def _explanations(e: Evidence) -> Iterator[str]:
    """Which other candidates would explain the rest, if one of a few would."""
    others = _alternatives(e)
    if others is None:
        return
    if any(source.epoch for source in e.equations.sources):
        if (added := added_column(e)) is not None:
            yield f"Beside them, {added} standard errors from zero."
        return
    if (best := _best_alternative(e, others)) is not None:
        text, part = best
        yield f"{text} would explain {min(part, 1.0):.1%}."
    else:
        families = shorten(others.names[len(e.strengths) :])
        yield f"None of {families}, on all parameters or on weights, would explain much more."


def _alternatives(e: Evidence) -> Equations | None:
    """The equations with the columns of other families; None where there are none."""
    blocks, names = e.equations.alternatives, (*e.equations.names, *e.equations.other_families)
    return replace(e.equations, names=names, blocks=blocks) if blocks else None


def _best_alternative(e: Evidence, others: Equations) -> tuple[str, float] | None:
    """The alternative that explains most, and what it explains; None if none helps much.

    One of more strengths is preferred only if it leaves a tenth of what one of fewer leaves, per
    equation that is left over.
    """
    rows, count = e.equations.rows, len(e.strengths)
    choices = [(choice.text, *_try(others, choice)) for choice in _choices(e, others)]
    choices = sorted([*choices, *_by_layer(e)], key=lambda choice: choice[1])
    left, best_text, best_size, best_part = HELPS, "", math.inf, 0.0
    for text, size, part in choices:
        rest = (1 - part) / max(rows - size, 1) / ((1 - e.explained) / max(rows - count, 1))
        if size > best_size and e.equations.targets > 1 and best_part >= WELL_EXPLAINED:
            break  # noise is left
        if max(rest, 1e-12) < (CLOSES if size > best_size else SAME) * left:
            left, best_text, best_size, best_part = max(rest, 1e-12), text, size, part
    return (best_text, best_part) if best_text else None


def _try(others: Equations, alternative: Alternative) -> tuple[int, float]:
    """The number of strengths of an alternative, and how much it explains."""
    size = len(alternative.columns)
    return size, _explained(_factor(others, alternative), size)


def _explained(factor: Tensor, size: int) -> float:
    """How much the first columns of a factor [design | targets] explain of the targets."""
    design, targets = factor[:, :size], factor[:, size:]
    return explained(design, System(design).solve(targets), targets)


def _by_layer(e: Evidence) -> Iterator[tuple[str, int, float]]:
    """The candidates with one strength per layer: how many strengths, and how much they explain."""
    if len(e.equations.layers) < 2 or len(e.equations.sources) > 1:
        return
    blocks = e.equations.blocks
    sizes = [len(block.columns) for block in blocks]
    squares = [
        between_groups(block.factor[:, size:], block.factor[:, size:])
        for block, size in zip(blocks, sizes, strict=True)
    ]
    if sum(squares) <= 0:
        return
    parts = [_explained(block.factor, size) for block, size in zip(blocks, sizes, strict=True)]
    part = sum(p * square for p, square in zip(parts, squares, strict=True)) / sum(squares)
    shown = shorten(e.equations.names, most=3)
    yield f"{shown} with one strength per layer (layerwise)", sum(sizes), part


def _choices(e: Evidence, others: Equations) -> Iterator[Alternative]:
    """Other scopes and families in place of the candidates, then beside them."""
    names, count = e.equations.names, len(e.equations.names)
    shown, both = shorten(names, most=3), (WEIGHTS, BIASES)
    given = tuple((column, both) for column in range(count))
    on_weights = tuple((column, (WEIGHTS,)) for column in range(count))
    yield Alternative(f"{shown} on weights only (scope=tacit.matrices)", on_weights)
    families = list(enumerate(others.names))[count:]
    for column, call in families:
        text = f"{call} in place of {shown}"
        yield Alternative(text, ((column, both),))
        yield Alternative(f"{_on_weights(call)} in place of {shown}", ((column, (WEIGHTS,)),))
    for column, call in families:
        yield Alternative(f"{call} beside {shown}", (*given, (column, both)))
        yield Alternative(f"{_on_weights(call)} beside {shown}", (*given, (column, (WEIGHTS,))))
        text = f"{call} beside {shown}, all on weights only (scope=tacit.matrices)"
        yield Alternative(text, (*on_weights, (column, (WEIGHTS,))))
    split = (*on_weights, *((column, (BIASES,)) for column in range(count)))
    yield Alternative(f"{shown} with separate strengths for weights and for biases", split)


def _on_weights(call: str) -> str:
    """A call with the scope of matrices: `l1(scope=tacit.matrices)`."""
    return f"{call[:-1]}{'' if call.endswith('()') else ', '}scope=tacit.matrices)"


def _factor(others: Equations, alternative: Alternative, source: int | None = None) -> Tensor:
    """[design | targets] of an alternative, of all sources or of one."""
    rows = []
    for block in others.blocks:
        if source in (None, block.source):
            design = [
                block.factor[:, column] * float(block.layer in layers)
                for column, layers in alternative.columns
            ]
            targets = block.factor[:, len(others.names) :]
            rows.append(torch.cat([torch.stack(design, dim=1), targets], dim=1))
    return torch.cat(rows)


def added_column(e: Evidence) -> str | None:
    """The column of another scope or family that epochs agree on, most clearly of all, in words.

    Its strength beside the candidates differs from zero by a t test at 1 %, divided among all
    columns that are tried, with the error bars of epochs; and it explains a part that is not
    negligible.
    """
    from scipy.special import stdtr

    others, sources = _alternatives(e), len(e.equations.sources)
    if others is None or sources < 2:
        return None
    added = list(_added_columns(e.equations.names, others))
    best, least = None, LACK_OF_FIT / len(added)
    for alternative in added:
        parts = [_factor(others, alternative, source) for source in range(sources)]
        width = len(alternative.columns) + 1
        means = [torch.cat([p[:, : width - 1], p[:, width - 1 :].mean(1, True)], 1) for p in parts]
        factors = torch.stack([_padded(part, width) for part in means])
        names = [str(i) for i in range(width - 1)]
        bars = jackknife(factors, names, kind="training", basis="")
        whole = factors.flatten(0, 1)
        design, target = whole[:, :-1], whole[:, -1:]
        strengths = System(design).solve(target)
        part = explained(design, strengths, target)
        before = explained(design[:, :-1], System(design[:, :-1]).solve(target), target)
        if bars is None or part - before <= (1 - WELL_EXPLAINED) * part:
            continue
        variance = float(bars.covariance[-1, -1]) * (1 + SHARED * sources)
        ratio = abs(float(strengths[-1])) / max(variance, 1e-300) ** 0.5
        probability = 2 * float(stdtr(bars.freedoms[-1] if bars.freedoms else bars.freedom, -ratio))
        if probability < least:
            least = probability
            best = f"{alternative.text} has the strength {float(strengths[-1]):.2g}, {ratio:.0f}"
    return best


def _padded(rows: Tensor, width: int) -> Tensor:
    factor = torch.linalg.qr(rows, mode="r").R
    return torch.cat([factor, factor.new_zeros(width - len(factor), width)])


def _added_columns(names: Sequence[str], others: Equations) -> Iterator[Alternative]:
    """The candidates with one more column, which is the last."""
    both = (WEIGHTS, BIASES)
    given = tuple((column, both) for column in range(len(names)))
    kinds = {block.layer for block in others.blocks}
    for column, call in list(enumerate(others.names))[len(names) :]:
        yield Alternative(call, (*given, (column, both)))
        if BIASES in kinds and WEIGHTS in kinds:
            yield Alternative(_on_weights(call), (*given, (column, (WEIGHTS,))))
