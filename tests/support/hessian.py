"""Networks of about 500 parameters, and targets that penalties of known strengths would make."""

from dataclasses import replace

import torch
from torch.nn import functional as F

import tacit
from support.models import random_data, tanh_mlp
from tacit.equations.target import Setting, Target, TargetPoint
from tacit.objective.params import fingerprint, norm
from tacit.regularizers import hessian_trace

LARGE = (20, 20, 4)
"""Sizes of a network of 504 parameters."""
MIDDLE, SMALL = (10, 12, 3), (4, 6, 2)


def objective_of(seed, sizes=LARGE, count=60):
    """A network, as it was initialised, on random classes."""
    X = random_data(seed + 100, count=count, inputs=sizes[0])[0]
    labels = torch.arange(count) % sizes[-1]
    return tacit.Objective(tanh_mlp(seed, sizes=sizes), F.cross_entropy, (X, labels))


def points_of(objective, count=1):
    """The model's parameters, and further points with other weights."""
    generator = torch.Generator().manual_seed(7)
    start = {n: p.detach().clone() for n, p in objective.point().items()}
    moved = [
        {n: p + 0.1 * torch.randn(p.shape, generator=generator).double() for n, p in start.items()}
        for _ in range(count - 1)
    ]
    return [start, *moved]


def exact_trace(objective):
    """The exact `hessian_trace`, computed once per point."""
    penalty, columns = hessian_trace(objective), {}

    def bind(params):
        key = fingerprint(params)
        if key not in columns:
            columns[key] = penalty.bind(params)
        return columns[key]

    return replace(penalty, bind=bind)


def target_of(regularizers, *, points=1, groups=1, missing=0.0, mode="difference"):
    """The target Σ λ_k ∇R_k at every point, of regularizers that have each norm 1 at the first.

    Args:
        regularizers: the first one has an objective.
        points: the number of points.
        groups: the number of groups of draws, with noise.
        missing: norm of a part that no regularizer explains.
        mode: of the equations.
    """
    generator = torch.Generator().manual_seed(3)
    objective, strengths = regularizers[0].objective, None

    def noise(params, size):
        entries = {n: torch.randn(p.shape, generator=generator).double() for n, p in params.items()}
        return {n: size / norm(entries) * e for n, e in entries.items()}

    places = []
    for params in points_of(objective, points):
        columns = [r.gradient(params)[r.name] for r in regularizers]
        strengths = strengths or [1 / norm(column) for column in columns]
        pairs = list(zip(strengths, columns, strict=True))
        rest = noise(params, missing)
        mean = {n: rest[n] + sum(s * c[n] for s, c in pairs) for n in params}
        vectors = [mean]
        if groups > 1:
            draws = [noise(params, 0.4) for _ in range(groups)]
            vectors = [{n: mean[n] + draw[n] for n in params} for draw in draws]
        places.append(TargetPoint(params, vectors, dict.fromkeys(params, 1e-16), 1.0))
    plain = objective if mode == "difference" else None
    return Target(Setting(mode, objective, plain, groups=groups), tuple(places))
