"""Where a residual lies, and which other candidates would explain it, in words."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.equations.alternatives import BIASES, WEIGHTS
from tacit.equations.equations import SMALLEST, Equations
from tacit.equations.noise import correct_factor
from tacit.fitting.column_noise import block_noise
from tacit.fitting.evidence import SAME_STEP, WELL_EXPLAINED, Evidence
from tacit.fitting.lack_of_fit import alternatives_of, clearest_addition, group_of, on_weights
from tacit.fitting.solving import RANK, System, between_groups, explained
from tacit.objective.params import shorten

HELPS, CLOSES, SAME = 0.5, 0.1, 0.9
"""Parts of what is unexplained that an alternative may leave to be named at all; of what is left by
the best one of fewer strengths; and of what is left by one of as many."""


class Alternative(NamedTuple):
    """Candidates that are compared with those of a fit: a column, and the blocks it covers."""

    text: str
    columns: tuple[tuple[int, tuple[str, ...]], ...]


def describe_residual(e: Evidence) -> str:
    """Sentences: where the residual lies, and which candidates would explain it."""
    return "".join(f" {sentence}" for sentence in (*_places(e), *_explanations(e)))


def better_scaled_by_time(e: Evidence) -> tuple[str, float] | None:
    """The candidate that explains most if its column grows with the step size, and how much.

    For steps that were compared with a flow: what finite steps add to it is in proportion to them.
    None where step sizes are equal, or where it leaves half of what is unexplained or more.
    """
    sizes = [source.step_sizes for source in e.equations.sources]
    flat = [size for of_source in sizes for size in of_source]
    if not all(sizes) or max(flat) < (1 + SAME_STEP) * min(flat):
        return None
    explained_by = {}
    for column, name in enumerate(e.equations.names):
        blocks = []
        for block in e.equations.blocks:
            factor = block.factor.clone()
            if column in block.columns:
                factor[:, block.columns.index(column)] *= sizes[block.source][block.step]
            blocks.append(replace(block, factor=factor))
        factor = replace(e.equations, blocks=tuple(blocks)).factor()
        explained_by[name] = _explained(factor, len(e.equations.names))
    best = max(explained_by, key=lambda name: explained_by[name])
    helps = 1 - explained_by[best] < HELPS * (1 - e.explained)
    return (best, explained_by[best]) if helps and e.explained < WELL_EXPLAINED else None


def _places(e: Evidence) -> Iterator[str]:
    """In which layers the residual lies, and how much of it in biases and norms."""
    by_layer = _residual_by_layer(e.equations, e.strengths)
    if len(by_layer) > 1:
        largest = sorted(by_layer, key=lambda layer: -by_layer[layer])[:3]
        shown = ", ".join(f"{by_layer[layer]:.0%} in layer {layer}" for layer in largest)
        yield f"The rest lies {shown}."
    others = alternatives_of(e.equations)
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
    factors, count = equations.layer_factors(), len(strengths)
    residuals = factors[:, :, count:] - (factors[:, :, :count] @ strengths)[:, :, None]
    squares = {
        layer: max(0.0, between_groups(residual, residual))
        for layer, residual in zip(equations.layers, residuals, strict=True)
    }
    total = sum(squares.values())
    return {layer: square / total if total else 0.0 for layer, square in squares.items()}


def _explanations(e: Evidence) -> Iterator[str]:
    """Which other candidates would explain the rest, if one of a few would."""
    if group_of(e.equations) is not None:
        if (addition := clearest_addition(e)) is not None:
            yield addition
        return
    others = alternatives_of(e.equations)
    if others is None:
        return
    if (best := _best_alternative(e, others)) is not None:
        text, part = best
        yield f"{text} would explain {min(part, 1.0):.1%}."
    else:
        families = shorten(others.names[len(e.strengths) :])
        yield f"None of {families}, on all parameters or on weights, would explain much more."


def _best_alternative(e: Evidence, others: Equations) -> tuple[str, float] | None:
    """The alternative that explains most, and what it explains; None if none helps much.

    One of more strengths is preferred only if it leaves a tenth of what one of fewer leaves, per
    equation that is left over.
    """
    rows, count = e.equations.rows, len(e.strengths)
    given = Alternative("", tuple((column, (WEIGHTS, BIASES)) for column in range(count)))
    unexplained = max(1 - _try(others, given)[1], 1e-12)  # all of it may lie in rows at kinks
    choices = [(choice.text, *_try(others, choice)) for choice in _choices(e, others)]
    choices = sorted([*choices, *_by_layer(e)], key=lambda choice: choice[1])
    left, best_text, best_size, best_part = HELPS, "", math.inf, 0.0
    for text, size, part in choices:
        rest = (1 - part) / max(rows - size, 1) / (unexplained / max(rows - count, 1))
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
    factors, count = e.equations.layer_factors(), len(e.equations.names)
    design, targets = factors[:, :, :count], factors[:, :, count:]
    norms = design.norm(dim=1)
    unit = design / torch.where(norms > SMALLEST, norms, math.inf)[:, None]
    fitted = unit @ (torch.linalg.pinv(unit, rtol=RANK) @ targets)
    strengths, whole, part = int((norms > SMALLEST).sum()), 0.0, 0.0
    for target, along in zip(targets, fitted, strict=True):
        square = between_groups(target, target)
        whole += square
        part += between_groups(along, target) if square > 0 else 0.0
    if whole > 0:
        shown = shorten(e.equations.names, most=3)
        yield f"{shown} with one strength per layer (layerwise)", strengths, part / whole


def _choices(e: Evidence, others: Equations) -> Iterator[Alternative]:
    """Other scopes and families in place of the candidates, then beside them."""
    names, count = e.equations.names, len(e.equations.names)
    shown, both = shorten(names, most=3), (WEIGHTS, BIASES)
    given = tuple((column, both) for column in range(count))
    weights_only = tuple((column, (WEIGHTS,)) for column in range(count))
    yield Alternative(f"{shown} on weights only (scope=tacit.matrices)", weights_only)
    families = list(enumerate(others.names))[count:]
    for column, call in families:
        text = f"{call} in place of {shown}"
        yield Alternative(text, ((column, both),))
        yield Alternative(f"{on_weights(call)} in place of {shown}", ((column, (WEIGHTS,)),))
    for column, call in families:
        yield Alternative(f"{call} beside {shown}", (*given, (column, both)))
        yield Alternative(f"{on_weights(call)} beside {shown}", (*given, (column, (WEIGHTS,))))
        text = f"{call} beside {shown}, all on weights only (scope=tacit.matrices)"
        yield Alternative(text, (*weights_only, (column, (WEIGHTS,))))
    split = (*weights_only, *((column, (BIASES,)) for column in range(count)))
    yield Alternative(f"{shown} with separate strengths for weights and for biases", split)


def _factor(others: Equations, alternative: Alternative) -> Tensor:
    """[design | targets] of an alternative."""
    rows = []
    for block in others.blocks:
        design = [
            block.factor[:, column] * float(block.layer in layers)
            for column, layers in alternative.columns
        ]
        targets = block.factor[:, len(others.names) :]
        rows.append(torch.cat([torch.stack(design, dim=1), targets], dim=1))
    factor, by_block = torch.cat(rows), block_noise(others)
    if by_block is None:
        return factor
    chosen = [(i, c, layers) for i, (c, layers) in enumerate(alternative.columns)]
    noisy = [(i, by_block.noisy.index(c), ls) for i, c, ls in chosen if c in by_block.noisy]
    if not noisy:
        return factor
    places, total = [place for _, place, _ in noisy], torch.zeros(len(noisy), len(noisy))
    for block, noise in zip(others.blocks, by_block.noises, strict=True):
        covered = torch.tensor([float(block.layer in layers) for _, _, layers in noisy])
        total = total + noise[places][:, places] * covered * covered[:, None]
    return correct_factor(factor, len(alternative.columns), [i for i, _, _ in noisy], total)
