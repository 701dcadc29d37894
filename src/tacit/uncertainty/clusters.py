"""The cluster jackknife: how strengths move when a layer, or an endpoint, is left out."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tacit.equations import Equations, triangle
from tacit.solving import RANK, System
from tacit.uncertainty.error_bars import ErrorBars, Kind, undetermined

SHARED = 0.92
"""Variance that the epochs of a run share, as a part of that of one epoch.

Chosen on elastic nets with seeds 100 to 139 and 5000 to 5499; `tacit reproduce training-coverage`
checks it on others.
"""
MEASURED = "86 to 100 % of the time, by the strength"
"""There, on those others."""


def of_layers(equations: Equations) -> ErrorBars | None:
    """Error bars from leaving out one layer at a time, at all points at once.

    They ask whether layers agree on one strength. A strength that only one layer tells has none.
    """
    parts = _joined(equations, [block.layer for block in equations.blocks])
    return jackknife(parts, equations.names, kind="layers", basis=f"{len(parts)} layers")


def of_sources(equations: Equations) -> ErrorBars | None:
    """Error bars from leaving out one stacked endpoint (or trajectory, or epoch) at a time.

    Sources are taken to be independent. Epochs of one run are not quite: an example is seen before
    the epoch's mean has felt it, which shifts every epoch's answer alike, by an amount of the order
    of the step size. `SHARED` allows for it, so that error bars shrink no further than that however
    many epochs are kept.
    """
    parts = _joined(equations, [block.source for block in equations.blocks])
    kinds = {"epoch" if source.epoch else source.mode for source in equations.sources}
    kind = kinds.pop() if len(kinds) == 1 else ""
    words = {
        "endpoint": "endpoints",
        "trajectory": "trajectories",
        "epoch": "epochs",
    }
    basis = f"{len(parts)} {words.get(kind, 'points')}"
    bars = jackknife(parts, equations.names, kind="training", basis=basis)
    if bars is None or not any(source.epoch for source in equations.sources):
        return bars
    covariance = bars.covariance * (1 + SHARED * len(parts))
    basis += ", with an allowance for what epochs share"
    return replace(bars, basis=basis, covariance=covariance, measured=MEASURED)


def jackknife(parts: Tensor, names: Sequence[str], *, kind: Kind, basis: str) -> ErrorBars | None:
    """Error bars from clusters of equations that are independent of each other (CV3).

    With λ₍₋g₎ the strengths without cluster g of G,

        covariance = (G−1)/G · Σ_g (λ₍₋g₎ − λ̂)(λ₍₋g₎ − λ̂)ᵀ,

    with a t distribution for every strength. Nothing is assumed of the rows inside a cluster. A
    strength that some cluster alone determines has an infinite variance; the others keep theirs.

    Where clusters are unequal, G−1 degrees of freedom are too many. Those of Satterthwaite (Bell &
    McCaffrey 2002) are used, with p_g the cluster's part of the strength's squared column (apart
    from the other columns) and d_g = p_g/(1−p_g),

        (Σ d)² / (Σ d² + (Σ d²)² − Σ d⁴),

    which is G−1 for equal clusters, and 1 where two clusters have all. In simulations of 2 to 30
    clusters, from equal to one with 20 times the weight of each other, nominal 95 % intervals
    covered 95–100 %, with G−1 degrees of freedom 79–97 %: they are wide where a cluster dominates.

    Args:
        parts: a factor [design | target] for each cluster, (clusters, rows, columns).
        names: of the strengths.
        kind: what the clusters are.
        basis: the same in words.
    """
    if len(parts) < 2:
        return None
    several = (parts[:, :, :-1] != 0).any(1).sum(0) > 1
    if not several.any():  # a family of one coefficient a layer, or a parameter
        lost = torch.full((len(names),), math.inf, dtype=torch.float64)
        covariance = undetermined(parts.new_zeros(len(names), len(names)), lost)
        return ErrorBars(kind, basis, tuple(names), covariance, 1.0)
    whole, count = triangle(parts.flatten(0, 1)), len(parts)
    found, lost = _solve_each(_left_out(parts))
    moved, lost = found - _solve_each(whole[None])[0], lost.any(0)
    covariance = (count - 1) / count * moved.T @ moved
    covariance = undetermined(covariance, torch.where(lost, math.inf, 1.0))
    freedoms = _freedoms(parts, System(whole[:, :-1])).clamp(1.0, count - 1.0)
    least = float(freedoms[~lost].min()) if (~lost).any() else 1.0
    return ErrorBars(kind, basis, tuple(names), covariance, least, tuple(freedoms.tolist()))


def padded(equations: Equations) -> Tensor:
    """[design | mean target] of every block over all columns, zero rows at the end of each."""
    count = len(equations.names)
    height = max(len(block.factor) for block in equations.blocks)
    wide = torch.zeros(len(equations.blocks), height, count + 1, dtype=torch.float64)
    alike: dict[tuple, list[int]] = {}
    for place, block in enumerate(equations.blocks):
        alike.setdefault((block.columns, len(block.factor)), []).append(place)
    for (columns, rows), places in alike.items():
        factors = torch.stack([equations.blocks[place].factor for place in places])
        own = len(columns)
        part = torch.zeros(len(places), rows, count + 1, dtype=torch.float64)
        part[:, :, list(columns)] = factors[:, :, :own]
        part[:, :, count] = factors[:, :, own:].mean(2)
        wide[places, :rows] = part
    return wide


def _joined(equations: Equations, labels: Sequence[str | int]) -> Tensor:
    """One factor for all blocks of a label, in a stack; labels that say nothing are not there."""
    places: dict[str | int, list[int]] = {}
    for place, (label, block) in enumerate(zip(labels, equations.blocks, strict=True)):
        if block.rows and block.columns:
            places.setdefault(label, []).append(place)
    wide = padded(equations)
    nothing, most = len(wide), max(map(len, places.values()))
    wide = torch.cat([wide, torch.zeros_like(wide[:1])])
    chosen = torch.tensor([[*own, *[nothing] * (most - len(own))] for own in places.values()])
    return torch.linalg.qr(wide[chosen].flatten(1, 2), mode="r").R


def _left_out(parts: Tensor) -> Tensor:
    """Factors of all clusters but one, (clusters, rows, columns), by triangles from both ends."""
    width = parts.shape[2]
    before, after = _running(parts), _running(parts.flip(0))[::-1]
    wide = torch.zeros(len(parts), 2 * width, width, dtype=torch.float64)
    for place, (above, below) in enumerate(zip(before, after, strict=True)):
        wide[place, : len(above)] = above
        wide[place, width : width + len(below)] = below
    return torch.linalg.qr(wide, mode="r").R


def _running(parts: Tensor) -> list[Tensor]:
    """The factor of all that comes before each part."""
    found = [parts[0][:0]]
    for part in parts[:-1]:
        found.append(triangle(torch.cat([found[-1], part])))
    return found


def _solve_each(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Strengths of each factor [design | target], and which of them it does not determine.

    The same rank decision as `System`, for many at once.
    """
    design, target = factors[:, :, :-1], factors[:, :, -1:]
    norms = design.norm(dim=1)
    scale = torch.where(norms > 0, norms, 1.0)
    u, s, vh = torch.linalg.svd(design / scale[:, None], full_matrices=False)
    kept = s > RANK * s[:, :1]
    projected = (u.mT @ target)[:, :, 0] * torch.where(kept, 1 / s, 0.0)
    found = (vh.mT @ projected[:, :, None])[:, :, 0] / scale
    # A strength is determined where its axis lies in what the kept directions span.
    seen = (vh.square() * kept[:, :, None]).sum(1)
    return found, (1 - seen).clamp(min=0).sqrt() > 1e-6


def _freedoms(parts: Tensor, system: System) -> Tensor:
    """Satterthwaite's degrees of freedom for every strength, from the clusters' shares in it."""
    inverse = torch.linalg.pinv(system.unit, rtol=RANK)
    alone = (inverse @ inverse.T) / system.norms[system.seen, None]
    shares = torch.ones(len(parts), len(system.norms), dtype=torch.float64)
    shares[:, system.seen] = (parts[:, :, system.seen] @ alone).square().sum(1)
    shares /= shares.sum(0)
    odds = shares / (1 - shares).clamp(min=1e-12)
    second = odds.square().sum(0)
    return odds.sum(0).square() / (second + second.square() - odds.pow(4).sum(0))
