"""Λ(t) of early stopping from resamples of one data set: when a bootstrap finds it."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from tacit.equations.equations import stack, triangular_factor
from tacit.fitting.fits import fit
from tacit.fitting.solving import System
from tacit.regularizers import symmetric
from tacit.regularizers.quadratic import quadratic_matrix
from tacit.theory import early_stopping
from tacit_paper import Check, Row, run_small
from tacit_paper import least_squares as ls
from tacit_paper.bootstrap_plot import crossovers, pick
from tacit_paper.bootstrap_plot import plot as plot

if TYPE_CHECKING:
    from pandas import DataFrame

TITLE = "Bootstrap recovery of the early-stopped regularizer"

CAPTION = """
One data set, trained again on m − 1 resamples of it; all m endpoints are stacked to find the
symmetric Λ(500) of early stopping. (A) Theory. (B) The least-norm answer from the single endpoint
on the data itself: 10 equations, 55 unknowns. (C, D) The pairs bootstrap, which draws examples with
replacement, at m = 50 and m = 100. (E) Distance to theory against m at σ = 10, in units of ‖Λ‖, so
that answering Λ̂ = 0 scores 1. (F) The same at m = 100 against the noise σ of the data.

Which bootstrap is right. Λ(t) is a function of XᵀX. The pairs bootstrap redraws X, so every
replicate has another Λ and their equations contradict each other; only where the noise spreads the
endpoints far (large σ) does the compromise beat Λ̂ = 0. The residual bootstrap keeps X and redraws
the targets: Λ is shared, and once there are as many endpoints as weights, m = 10, the answer is
exact to rounding at every σ. Use the residual bootstrap where inputs can be held fixed and targets
are real numbers; elsewhere the pairs bootstrap, with care.

As published: data, seeds, pools of 100 endpoints, σ. Different: the residual bootstrap beside the
published one; (E) medians over the pools with their range, because around m = p = 10 the system is
barely determined and the error is heavy-tailed: single pools lie several times above the rest, and
the published mean (dotted) follows them; (F) further draws of the data, each with its own
crossover (ticks): over the paper preset's forty draws they lie between σ ≈ 4 and σ ≈ 15, most of
them later than the published one near 6.
""".strip()

Kind = Literal["pairs", "residual"]


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    seed: int = ls.SEED
    resampling_seed: int = 42
    noise: float = 10.0
    """σ of panels B to E."""
    step: float = 0.01
    """η of θ += (η/n) Xᵀ(y − Xθ)."""
    stop: int = 500
    pools: int = 10
    endpoints: tuple[int, ...] = tuple(range(1, 101))
    """Numbers m of stacked endpoints; the last is a pool's size."""
    shown: tuple[int, int, int] = (1, 50, 100)
    """m of panels B, C and D."""
    sigmas: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0)
    noise_offset: int = 7919
    """Seed of the noise in panel F, beyond the data's."""
    draws: int = 40
    draw_pools: int = 3

    @property
    def size(self) -> int:
        """How many endpoints a pool has, the one on the data itself included."""
        return self.endpoints[-1]


PAPER = Config()
QUICK = Config(
    pools=4,
    endpoints=(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 20, 30, 40, 50, 70, 100),
    draws=20,
    draw_pools=1,
)


def units(config: Config) -> list[str]:
    """Pieces of work, in order."""
    return list(_work(config))


def run(config: Config, *, finished: Collection[str] = (), device: str = "cpu") -> Iterator[Row]:
    """Rows of every unit that is not finished.

    Matrices are 1000×10, for which no device beats the CPU: all is computed there, in float64.
    """
    work = {unit: partial(piece, config) for unit, piece in _work(config).items()}
    return run_small(work, finished)


def _work(config: Config) -> dict[str, Callable[[Config], Iterator[Row]]]:
    kinds: tuple[Kind, ...] = ("pairs", "residual")
    pools = {
        f"{kind} pool {j}": partial(_pool, kind=kind, pool=j)
        for kind in kinds
        for j in range(config.pools)
    }
    return {
        "theory": _theory,
        **pools,
        **{f"sigma {sigma:g}": partial(_sigma, sigma=sigma) for sigma in config.sigmas},
        **{f"draw {d}": partial(_draw, draw=d) for d in range(1, config.draws + 1)},
    }


class Resamples(NamedTuple):
    """Resampled data sets of a pool: inputs (m×n×p) and observations (m×n×r), the data's first."""

    X: Tensor
    Y: Tensor


class Endpoints(NamedTuple):
    """Weights (m×p×r) where training on every resample stopped, and the loss gradient there."""

    thetas: Tensor
    gradients: Tensor


def _theory(config: Config) -> Iterator[Row]:
    X = ls.draw(config.seed).X
    yield from _entries("A", early_stopping(X, config.step, config.stop), t=config.stop)


def _pool(config: Config, *, kind: Kind, pool: int) -> Iterator[Row]:
    """Panels B to E: the library's own estimate from the first m endpoints of a pool."""
    X, _, y = ls.draw(config.seed, config.noise)
    samples = resample(X, y[:, None], config, kind=kind, pool=pool)
    thetas = endpoints(samples, config).thetas[..., 0]
    family = symmetric()
    triples = zip(samples.X, samples.Y[..., 0], thetas, strict=True)
    parts = [ls.equations(inputs, targets, theta, family) for inputs, targets, theta in triples]
    theory = early_stopping(X, config.step, config.stop)
    for m in config.endpoints:
        found = fit(stack(parts[:m]))
        yield {
            "panel": "E",
            "series": kind,
            "pool": pool,
            "sigma": config.noise,
            "m": m,
            **_distance(found.matrix(), theory),
            "rank": found.rank,
            "explained": found.explained,
        }
        if kind == "pairs" and pool == 0 and m in config.shown:
            yield from _entries("BCD"[config.shown.index(m)], found.matrix(), m=m)


def _sigma(config: Config, *, sigma: float) -> Iterator[Row]:
    """Panel F: whole pools at another noise, by both bootstraps."""
    X, Y = _observations(config, config.seed, (sigma,))
    theory = early_stopping(X, config.step, config.stop)
    for pool in range(config.pools):
        for kind in ("pairs", "residual"):
            at = endpoints(resample(X, Y, config, kind=kind, pool=pool), config)
            distance = _distance(estimate(at.thetas[..., 0], at.gradients[..., 0]), theory)
            yield {
                "panel": "F",
                "series": kind,
                "pool": pool,
                "sigma": sigma,
                "m": config.size,
                **distance,
            }


def _draw(config: Config, *, draw: int) -> Iterator[Row]:
    """Panel F: the pairs bootstrap on another draw of inputs, coefficients and noise."""
    X, Y = _observations(config, config.seed + draw, config.sigmas)
    theory = early_stopping(X, config.step, config.stop)
    for pool in range(config.draw_pools):
        at = endpoints(resample(X, Y, config, kind="pairs", pool=pool), config)
        for k, sigma in enumerate(config.sigmas):
            distance = _distance(estimate(at.thetas[..., k], at.gradients[..., k]), theory)
            yield {
                "panel": "F",
                "series": "draw",
                "draw": draw,
                "pool": pool,
                "sigma": sigma,
                "m": config.size,
                **distance,
            }


def _observations(config: Config, seed: int, sigmas: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Inputs, and one column of observations a σ: the same noise, scaled."""
    X, coefficients, _ = ls.draw(seed)
    generator = torch.Generator().manual_seed(seed + config.noise_offset)
    noise = torch.randn(len(X), generator=generator).double()
    return X, (X @ coefficients)[:, None] + noise[:, None] * torch.tensor(sigmas, dtype=X.dtype)


def resample(X: Tensor, Y: Tensor, config: Config, *, kind: Kind, pool: int) -> Resamples:
    """The data itself and the resamples of a pool, for every column of Y (n×r)."""
    rows = [torch.arange(len(X))]
    for k in range(1, config.size):
        seed = ls.endpoint_seed(pool, k, config.resampling_seed)
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.randint(len(X), (len(X),), generator=generator))
    drawn = torch.stack(rows)
    if kind == "pairs":
        return Resamples(X[drawn], Y[drawn])
    fitted = X @ endpoints(Resamples(X[None], Y[None]), config).thetas[0]
    return Resamples(X.expand(len(drawn), -1, -1), fitted + (Y - fitted)[drawn])


def endpoints(samples: Resamples, config: Config) -> Endpoints:
    """Descend from zero on all resamples at once: with XᵀX/n and Xᵀy/n a step is p×p."""
    turned = samples.X.mT / samples.X.shape[1]
    gram, moment = turned @ samples.X, turned @ samples.Y
    thetas = torch.zeros_like(moment)
    for _ in range(config.stop):
        thetas = thetas + config.step * (moment - gram @ thetas)
    return Endpoints(thetas, 2 * (gram @ thetas - moment))


def estimate(thetas: Tensor, gradients: Tensor) -> Tensor:
    """Λ̂ from endpoints (m×p each), as the library finds it, with all equations written at once."""
    count, size = thetas.shape
    i, j = torch.triu_indices(size, size)
    column = torch.arange(len(i))
    design = thetas.new_zeros(count, size, len(i))
    design[:, i, column] += thetas[:, j]
    design[:, j, column] += thetas[:, i]
    design *= (
        torch.where(i == j, 1.0, 2.0).to(thetas).sqrt()
    )  # the orthonormal basis of symmetric()
    rows = torch.cat([design.flatten(0, 1), -gradients.reshape(-1, 1)], dim=1)
    factor = triangular_factor(rows)
    strengths = System(factor[:, :-1]).solve(factor[:, -1:])[:, 0]
    return quadratic_matrix(strengths, "symmetric")


def _distance(found: Tensor, theory: Tensor) -> Row:
    return {
        "value": float((found - theory).norm()),
        "baseline": float(theory.norm()),
        "relative": ls.relative_error(found, theory),
    }


def _entries(panel: str, matrix: Tensor, **at: int) -> Iterator[Row]:
    for i, row in enumerate(matrix.tolist()):
        for j, value in enumerate(row):
            yield {"panel": panel, "series": "entry", "i": i, "j": j, "value": value, **at}


def check(rows: "DataFrame") -> list[Check]:
    """Key numbers against the expected ones."""
    curve, redrawn = pick(rows, "E", "pairs"), pick(rows, "E", "residual")
    sweep, anywhere = pick(rows, "F", "pairs"), pick(rows, "F", "residual")
    pairs = curve.groupby("m").relative.median()
    exact = redrawn.relative[redrawn.m >= 11].max()
    at_ten = sweep.relative[sweep.sigma == 10].mean()
    own, others = crossovers(rows)
    norm = float(curve.baseline.iloc[0])
    peak = float(pairs.idxmax())
    return [
        Check("‖Λ(500)‖, Frobenius", norm, "0.02610", abs(norm - 0.02610) < 5e-6),
        _within("pairs, σ = 10, m = 100: relative error (panel F, mean)", at_ten, 0.52, 0.72),
        _within("the same in panel E (median)", pairs.iloc[-1], 0.52, 0.72),
        _within("m at which the pairs bootstrap is worst", peak, 8, 12),
        _within("crossover with Λ̂ = 0 on the paper's draw, σ", own, 5, 7.5),
        _within(f"median crossover of {len(others)} further draws, σ", others.median(), 6, 10),
        _below("residual, σ = 10, m ≥ 11: largest relative error", exact, 1e-9),
        _below("residual, every σ, m = 100: largest relative error", anywhere.relative.max(), 1e-9),
    ]


def _within(label: str, value: float, low: float, high: float) -> Check:
    return Check(label, float(value), f"{low:g} to {high:g}", bool(low <= value <= high))


def _below(label: str, value: float, most: float) -> Check:
    return Check(label, float(value), f"at most {most:g}", bool(value <= most))
