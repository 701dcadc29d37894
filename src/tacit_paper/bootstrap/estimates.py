"""Rows of the bootstrap figure: estimates of Λ(t) from stacked endpoints, and their distances."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from tacit.equations.equations import stack
from tacit.equations.factors import triangular_factor
from tacit.fitting.fits import fit
from tacit.fitting.solving import System
from tacit.regularizers import symmetric
from tacit.regularizers.quadratic import quadratic_matrix
from tacit.theory import early_stopping
from tacit_paper import Row
from tacit_paper import least_squares as ls
from tacit_paper.bootstrap.config import KINDS, Config, Kind
from tacit_paper.bootstrap.training import resample, train


def theory_rows(config: Config) -> Iterator[Row]:
    """Panel A: the entries of Λ(t)."""
    X = ls.draw(config.seed).X
    yield from _matrix_rows("A", early_stopping(X, config.step, config.stop), t=config.stop)


def pool_rows(config: Config, *, kind: Kind, pool: int) -> Iterator[Row]:
    """Panels B to E: the estimate from the first m endpoints of a pool, by `tacit.fit`."""
    X, _, y = ls.draw(config.seed, config.noise)
    samples = resample(X, y[:, None], config, kind=kind, pool=pool)
    thetas = train(samples, config).thetas[..., 0]
    regularizer = symmetric()
    equations = [
        ls.equations(inputs, observations, theta, regularizer)
        for inputs, observations, theta in zip(samples.X, samples.Y[..., 0], thetas, strict=True)
    ]
    theory = early_stopping(X, config.step, config.stop)
    for m in config.endpoints:
        pooled = fit(stack(equations[:m]))
        labels = {"panel": "E", "series": kind, "pool": pool, "sigma": config.noise, "m": m}
        distances = _distances(pooled.matrix(), theory)
        yield {**labels, **distances, "rank": pooled.rank, "explained": pooled.explained}
        if kind == "pairs" and pool == 0 and m in config.shown:
            yield from _matrix_rows("BCD"[config.shown.index(m)], pooled.matrix(), m=m)


def joined_rows(config: Config) -> Iterator[Row]:
    """Panel E, beyond its end: the pairs bootstrap from many pools, joined to one."""
    X, _, y = ls.draw(config.seed, config.noise)
    theory = early_stopping(X, config.step, config.stop)
    endpoints = [
        train(resample(X, y[:, None], config, kind="pairs", pool=pool), config)
        for pool in range(max(config.joined))
    ]
    for count in config.joined:
        thetas, gradients = (
            # Every pool begins with the data set itself, which is counted once.
            torch.cat([part[int(k > 0) :] for k, part in enumerate(parts[:count])])[..., 0]
            for parts in zip(*endpoints, strict=True)
        )
        distances = _distances(estimate_penalty(thetas, gradients), theory)
        labels = {"panel": "E", "series": "joined", "sigma": config.noise, "m": len(thetas)}
        yield {**labels, **distances}


def noise_rows(config: Config, *, sigma: float) -> Iterator[Row]:
    """Panel F: whole pools at another noise, by both bootstraps."""
    for pool, kind in product(range(config.pools), KINDS):
        yield from _noise_rows(config, config.seed, (sigma,), kind, pool, {"series": kind})


def draw_rows(config: Config, *, draw: int) -> Iterator[Row]:
    """Panel F: the pairs bootstrap on another draw of inputs, coefficients and noise."""
    labels = {"series": "draw", "draw": draw}
    for pool in range(config.draw_pools):
        yield from _noise_rows(config, config.seed + draw, config.sigmas, "pairs", pool, labels)


def _noise_rows(
    config: Config, seed: int, sigmas: tuple[float, ...], kind: Kind, pool: int, labels: Row
) -> Iterator[Row]:
    """One row per σ: a whole pool on the same inputs, coefficients and noise, which σ scales."""
    X, coefficients, _ = ls.draw(seed)
    generator = torch.Generator().manual_seed(seed + config.noise_offset)
    noise = torch.randn(len(X), generator=generator).double()
    Y = (X @ coefficients)[:, None] + noise[:, None] * torch.tensor(sigmas, dtype=X.dtype)
    theory = early_stopping(X, config.step, config.stop)
    endpoints = train(resample(X, Y, config, kind=kind, pool=pool), config)
    for k, sigma in enumerate(sigmas):
        estimate = estimate_penalty(endpoints.thetas[..., k], endpoints.gradients[..., k])
        distances = _distances(estimate, theory)
        yield {"panel": "F", **labels, "pool": pool, "sigma": sigma, "m": config.size, **distances}


def estimate_penalty(thetas: Tensor, gradients: Tensor) -> Tensor:
    """Λ̂ from endpoints (m×p each): the same estimate as `tacit.fit`, with all equations at once.

    Each endpoint gives the p equations 2Λθ = −∇L. The unknowns are the coefficients of Λ in the
    orthonormal basis of `symmetric()`: B = Eᵢᵢ on the diagonal and B = (Eᵢⱼ + Eⱼᵢ)/√2 off it. The
    column of B is 2Bθ: 2θᵢ in row i on the diagonal; √2θⱼ in row i and √2θᵢ in row j off it.
    """
    count, size = thetas.shape
    i, j = torch.triu_indices(size, size)
    column = torch.arange(len(i))
    design = thetas.new_zeros(count, size, len(i))
    design[:, i, column] += thetas[:, j]
    design[:, j, column] += thetas[:, i]
    design *= torch.where(i == j, 1.0, 2.0).to(thetas).sqrt()
    factor = triangular_factor(torch.cat([design.flatten(0, 1), -gradients.reshape(-1, 1)], dim=1))
    strengths = System(factor[:, :-1]).solve(factor[:, -1:])[:, 0]
    return quadratic_matrix(strengths, "symmetric")


def _distances(estimate: Tensor, theory: Tensor) -> Row:
    value, baseline = float((estimate - theory).norm()), float(theory.norm())
    return {"value": value, "baseline": baseline, "relative": ls.relative_error(estimate, theory)}


def _matrix_rows(panel: str, matrix: Tensor, **labels: int) -> Iterator[Row]:
    for i, entries in enumerate(matrix.tolist()):
        for j, value in enumerate(entries):
            yield {"panel": panel, "series": "entry", "i": i, "j": j, "value": value, **labels}
