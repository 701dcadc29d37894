"""Error bars of shapes: how far parts of the equations disagree on them."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tacit.equations.equations import Equations
from tacit.fitting.error_bars import ErrorBars, ErrorKind, satterthwaite
from tacit.fitting.solving import System

Point = tuple[float, ...]
"""One number per shape, from 0 at its lower bound to 1 at its upper bound."""
STEP = 1e-3
"""Distance of the points, as a part of the range, at which residuals are compared."""


def square_residual(equations: Equations, group: int | None = None) -> float:
    """‖target − design·λ̂‖² of the strengths of `fit`, of one group of draws or of the mean."""
    factor, count = equations.factor(), len(equations.names)
    targets = factor[:, count:]
    target = targets.mean(1, keepdim=True) if group is None else targets[:, group, None]
    system = System(factor[:, :count])
    strengths = system.solve_bounded(target, equations.bounded())
    return float((target - system.design @ strengths).square().sum())


def target_square(equations: Equations) -> float:
    """‖target‖² of the mean target, without the joint factor of all blocks."""
    targets = [block.factor[:, len(block.columns) :].mean(1) for block in equations.blocks]
    return sum(float(target.square().sum()) for target in targets)


def shape_error_bars(
    names: tuple[str, ...],
    write: Callable[[Point], Equations],
    best: Point,
    slopes: Sequence[float],
) -> dict[str, ErrorBars]:
    """Error bars of shapes by kind: of groups of draws, stacked sources, and layers.

    A part of the equations has its own minimum. Near ŝ it is ŝ − H⁻¹g, with gradient g and Hessian
    H of the part's squared residual at ŝ, from differences between few points. With ŝ₍₋g₎ that of
    all clusters but g of G, the jackknife is

        covariance = (G−1)/G · Σ_g (ŝ₍₋g₎ − ŝ)(ŝ₍₋g₎ − ŝ)ᵀ.

    Degrees of freedom are Satterthwaite's, as for strengths: see `error_bars.jackknife`, with a
    cluster's share of H in place of its share of a column. For groups of draws every group has its
    own minimum, and the covariance is that of their mean.

    Args:
        names: the shapes.
        write: from a point, in coordinates from 0 to 1, to equations.
        best: ŝ in those coordinates.
        slopes: derivatives of the shapes by the coordinates.
    """
    stencil = {offset: write(_moved(best, offset)) for offset in _offsets(len(names))}
    scale = torch.tensor(list(slopes), dtype=torch.float64)
    bars = [_draw_errors(names, stencil, scale)]
    first = next(iter(stencil.values()))
    kinds: dict[ErrorKind, list[Hashable]] = {
        "training": [block.source for block in first.blocks],
        "layers": [block.layer for block in first.blocks],
    }
    for kind, labels in kinds.items():
        bars.append(_jackknife(names, kind, labels, stencil, scale))
    return {error_bars.kind: error_bars for error_bars in bars if error_bars is not None}


def _offsets(count: int) -> list[tuple[int, ...]]:
    """Steps along every shape, and along every pair of shapes."""
    zero = [0] * count
    offsets = [tuple(zero)]
    for i in range(count):
        for j in range(i, count):
            signs = ((1, 1), (-1, -1)) if i == j else ((1, 1), (1, -1), (-1, 1), (-1, -1))
            for a, b in signs:
                offset = list(zero)
                offset[i], offset[j] = a, b
                offsets.append(tuple(offset))
    return offsets


def _moved(best: Point, offset: tuple[int, ...]) -> Point:
    return tuple(u + STEP * step for u, step in zip(best, offset, strict=True))


def _expansion(
    stencil: dict[tuple[int, ...], Equations], square: Callable[[Equations], float]
) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian of a squared residual, from its values on the stencil."""
    values = {offset: square(equations) for offset, equations in stencil.items()}
    count = len(next(iter(values)))

    def at(*steps: tuple[int, int]) -> float:
        offset = [0] * count
        for place, step in steps:
            offset[place] = step
        return values[tuple(offset)]

    gradient = torch.zeros(count, dtype=torch.float64)
    hessian = torch.zeros(count, count, dtype=torch.float64)
    for i in range(count):
        gradient[i] = (at((i, 1)) - at((i, -1))) / (2 * STEP)
        hessian[i, i] = (at((i, 1)) - 2 * at() + at((i, -1))) / STEP**2
        for j in range(i):
            mixed = sum(a * b * at((j, a), (i, b)) for a in (1, -1) for b in (1, -1))
            hessian[i, j] = hessian[j, i] = mixed / (4 * STEP**2)
    return gradient, hessian


def _shift(gradient: Tensor, hessian: Tensor) -> Tensor:
    """From ŝ to the minimum of a part; infinite where the part determines none."""
    if not torch.linalg.eigvalsh(hessian)[0] > 0:
        return torch.full_like(gradient, math.inf)
    return -torch.linalg.solve(hessian, gradient)


def _draw_errors(
    names: tuple[str, ...], stencil: dict[tuple[int, ...], Equations], scale: Tensor
) -> ErrorBars | None:
    groups = next(iter(stencil.values())).targets
    if groups < 2:
        return None
    shifts = torch.stack(
        [
            _shift(*_expansion(stencil, lambda e, group=group: square_residual(e, group)))
            for group in range(groups)
        ]
    )
    deviations = (shifts - shifts.mean(0)) * scale
    covariance = _finite(deviations.T @ deviations / (groups * (groups - 1)))
    return ErrorBars("draws", f"{groups} groups of draws", names, covariance, groups - 1.0)


def _jackknife(
    names: tuple[str, ...],
    kind: ErrorKind,
    labels: Sequence[Hashable],
    stencil: dict[tuple[int, ...], Equations],
    scale: Tensor,
) -> ErrorBars | None:
    clusters = list(dict.fromkeys(labels))
    if len(clusters) < 2:
        return None
    count = len(clusters)
    gradient, hessian = _expansion(stencil, square_residual)
    whole, shifts, shares = _shift(gradient, hessian), [], []
    for cluster in clusters:
        others = [i for i, label in enumerate(labels) if label != cluster]

        def square(equations: Equations, others: list[int] = others) -> float:
            blocks = tuple(equations.blocks[i] for i in others)
            return square_residual(replace(equations, blocks=blocks, means=()))

        part = _expansion(stencil, square)
        shifts.append(_shift(*part))
        shares.append(1 - part[1].diagonal() / hessian.diagonal())
    deviations = (torch.stack(shifts) - whole) * scale
    covariance = _finite((count - 1) / count * deviations.T @ deviations)
    parts = torch.stack(shares).clamp(0, 1)
    parts = parts / parts.sum(0).clamp_min(torch.finfo(parts.dtype).tiny)
    freedoms = torch.nan_to_num(satterthwaite(parts), nan=1.0).clamp(1.0, count - 1.0)
    plural = {"training": "stacked points", "layers": "layers"}[kind]
    smallest = float(freedoms.min())
    return ErrorBars(
        kind, f"{count} {plural}", names, covariance, smallest, tuple(freedoms.tolist())
    )


def _finite(covariance: Tensor) -> Tensor:
    """The covariance, with an infinite variance where some part determines no shape."""
    if torch.isfinite(covariance).all():
        return covariance
    return torch.diag(torch.full_like(covariance.diagonal(), math.inf))
