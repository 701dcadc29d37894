"""Early stopping in least squares: its exact penalty Λ(t), and what endpoints tell of it."""

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tacit.equations.endpoint import endpoint_equations
from tacit.equations.equations import Equations, stack
from tacit.fitting.fits import fit
from tacit.objective.objective import Objective
from tacit.regularizers import diagonal, l2, symmetric
from tacit.theory import early_stopping
from tacit.uncertainty.scores import score_examples
from tacit.validation import certify_least_squares
from tacit_paper import Row, run_small
from tacit_paper import least_squares as ls
from tacit_paper.early_stopping_check import check as check
from tacit_paper.early_stopping_plot import plot as plot

TITLE = "Implicit regularization due to early stopping"

CAPTION = """
Gradient descent on least squares, stopped after t steps, lands exactly where the penalty θᵀΛ(t)θ
would have put the minimum. (A) Λ(500) from theory. (B) The symmetric estimate from m endpoints that
share the inputs and stop at t = 500: from m = 10, the number of weights, the equations have full
rank and it is exact to rounding; below that no estimator could be. Trained in float32 it is good to
four digits. (C) One endpoint and a diagonal penalty: retraining with the penalty and without
stopping gives the stopped weights back. This holds by construction (10 equations, 10 unknowns), and
it does not make the diagonal a penalty: in about three data sets of four it has a negative entry,
and where XᵀX/n + diag(Λ̂) is not positive definite the penalised loss has no minimum at all, so the
estimate is refused there. (D) Endpoints that stop on their own: they no longer share one Λ, so the
error falls slowly and does not vanish. This is misspecification, not a richer signal. (E) A single
ridge strength. It equals the Rayleigh quotient θᵀΛθ/θᵀθ; the published theory curve tr(Λ)/p lies
above it. Bands are 95 % intervals: in B and D of training, over pools of endpoints (t); in E of
sampling, how far λ̂ may be from this on another thousand examples at the same weights. The later
training stops, the more of λ̂ is about the very examples that were trained on: at t = 500 the
interval holds zero.

As published: data, seeds, pools, step, checkpoints and Adam's settings. Different: the step is
θ += (η/n)Xᵀ(y − Xθ), for which the formula is exact. (D) The text says that any decrease of the
loss counts as an improvement; then in float64 24 of 25 runs never stop, and float32 stops
near step 960, at the level of its rounding. The published curve needs a least improvement of 0.001;
all are drawn. (E) The curve is the exact least-squares strength, with the published Adam fit as
dots and the Rayleigh quotient beside the published trace.
""".strip()


@dataclass(frozen=True)
class Config:
    """Sizes and settings; the defaults are the paper's."""

    seed: int = ls.SEED
    step: float = 0.01
    """η of θ += (η/n) Xᵀ(y − Xθ)."""
    stop: int = 500
    """The fixed iterate of panels A to C."""
    identity: tuple[int, ...] = (1, 10, 100, 500, 1000)
    pools: int = 10
    endpoints: tuple[int, ...] = (*range(1, 13), 15, 20, 30, 50, 70, 100)
    """Numbers m of stacked endpoints; the last is a pool's size."""
    datasets: int = 200
    datasets_per_unit: int = 50
    cap: int = 2000
    patience: int = 5
    min_delta: float = 1e-3
    """Least improvement of the mean squared error that the published panel D needs."""
    checkpoints: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 150, 200, 300, 500, 1000)
    adam_rate: float = 0.05
    adam_epochs: int = 30_000
    adam_patience: int = 2000


PAPER = Config()
QUICK = Config(pools=4, endpoints=(1, 2, 4, 6, 8, 9, 10, 11, 20, 50, 100))


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
    starts = range(0, config.datasets, config.datasets_per_unit)
    return {
        "theory": _theory,
        "diagonal": _diagonal,
        **{f"datasets from {start}": partial(_datasets, start=start) for start in starts},
        **{f"fixed pool {j}": partial(_fixed_pool, pool=j) for j in range(config.pools)},
        **{f"variable pool {j}": partial(_variable_pool, pool=j) for j in range(config.pools)},
        "trace": _trace,
    }


def _theory(config: Config) -> Iterator[Row]:
    """Panel A, and the identity that it rests on, with either convention of a step."""
    X, _, y = ls.draw(config.seed)
    yield from _matrix_rows("A", "theory", early_stopping(X, config.step, config.stop))
    for series, factor in (("half-MSE step", 1.0), ("MSE step", 2.0)):
        path = ls.descend(X, y, factor * config.step, max(config.identity))
        for t in config.identity:
            minimiser = ls.penalised(X, y, early_stopping(X, config.step, t))
            distance = ls.relative_error(minimiser, path.iterates[t, :, 0])
            yield {"panel": "identity", "series": series, "t": t, "value": distance}


def _diagonal(config: Config) -> Iterator[Row]:
    """Panel C: the paper's data set."""
    X, truth, y = ls.draw(config.seed)
    theta, penalty, again = _retrained(X, y, config)
    series = {
        "true": truth,
        "early-stopped": theta,
        "retrained": again,
        "estimate": penalty.diagonal(),
        "theory": early_stopping(X, config.step, config.stop).diagonal(),
    }
    for name, values in series.items():
        for i, value in enumerate(values.tolist()):
            yield {"panel": "C", "series": name, "i": i, "value": value}


def _datasets(config: Config, *, start: int) -> Iterator[Row]:
    """Panel C over further draws: is the diagonal a penalty, and is there a minimum?"""
    for k in range(start, min(start + config.datasets_per_unit, config.datasets)):
        X, _, y = ls.draw(config.seed + k)
        theta, penalty, again = _retrained(X, y, config)
        certificate = certify_least_squares(X, y, penalty)
        yield {
            "panel": "C",
            "series": "dataset",
            "dataset": k,
            "value": ls.relative_error(again, theta),
            "least_entry": float(penalty.diagonal().min()),
            "least_eigenvalue": min(certificate.eigenvalues),
            "verdict": certificate.verdict,
        }


def _retrained(X: Tensor, y: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Early-stopped weights, the diagonal estimate from them, and what it alone leads to."""
    theta = ls.descend(X, y, config.step, config.stop).iterates[-1, :, 0]
    penalty = fit(ls.equations(X, y, theta, diagonal())).matrix()
    return theta, penalty, ls.penalised(X, y, penalty)


def _fixed_pool(config: Config, *, pool: int) -> Iterator[Row]:
    """Panel B: endpoints at one iterate, trained in float64 and in float32."""
    X, Y = _pool(config, pool)
    objectives = [ls.objective(X, y) for y in Y.T]
    theory = early_stopping(X, config.step, config.stop)
    for series, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        thetas = ls.descend(X, Y, config.step, config.stop, dtype).iterates[-1]
        for row, matrix in _prefixes(_endpoints(objectives, thetas), theory, config):
            yield {"panel": "B", "series": series, "pool": pool, **row}
            if series == "float64" and pool == 0 and row["m"] == X.shape[1]:
                yield from _matrix_rows("B", "estimate", matrix)


def _variable_pool(config: Config, *, pool: int) -> Iterator[Row]:
    """Panel D: endpoints that stop on their own, by the published rule and by the text's."""
    X, Y = _pool(config, pool)
    objectives = [ls.objective(X, y) for y in Y.T]
    paths = {
        d: ls.descend(X, Y, config.step, config.cap, d) for d in (torch.float64, torch.float32)
    }
    # Λ(t) depends on XᵀX/n alone, which these few rows share.
    few = torch.linalg.qr(X).R * math.sqrt(X.shape[1] / len(X))
    rules = (
        ("min_delta", torch.float64, config.min_delta),
        ("text float64", torch.float64, 0.0),
        ("text float32", torch.float32, 0.0),
    )
    for series, dtype, min_delta in rules:
        path = paths[dtype]
        times = ls.stopping_times(path.losses, patience=config.patience, min_delta=min_delta)
        thetas = torch.stack([path.iterates[t, :, k] for k, t in enumerate(times)], dim=1)
        laws = {t: early_stopping(few, config.step, t) for t in set(times)}
        target = torch.stack([laws[t] for t in times]).quantile(0.5, dim=0)
        own = {"panel": "D", "series": series, "pool": pool}
        for row, _ in _prefixes(_endpoints(objectives, thetas), target, config):
            yield {**own, **row}
        for k, t in enumerate(times):
            yield {**own, "series": f"{series} stops", "endpoint": k, "t": t}


def _pool(config: Config, pool: int) -> tuple[Tensor, Tensor]:
    X = ls.draw(config.seed).X
    return X, ls.pool(X, pool, max(config.endpoints), seed=config.seed)


def _endpoints(objectives: list[Objective], thetas: Tensor) -> list[Equations]:
    family = symmetric()
    pairs = zip(objectives, thetas.T, strict=True)
    return [endpoint_equations(o, family, params=ls.point(theta)) for o, theta in pairs]


def _prefixes(
    parts: list[Equations], target: Tensor, config: Config
) -> Iterator[tuple[Row, Tensor]]:
    """The estimate from the first m endpoints, its error and rank, for every m."""
    size = len(target)
    for m in config.endpoints:
        found = fit(stack(parts[:m]))
        few = min(m, size)
        expected = few * size - few * (few - 1) // 2
        error = ls.relative_error(found.matrix(), target)
        yield (
            {"m": m, "value": error, "rank": found.rank, "rank_expected": expected},
            found.matrix(),
        )


def _trace(config: Config) -> Iterator[Row]:
    """Panel E: one ridge strength at every checkpoint, exactly and by the published fit."""
    X, _, y = ls.draw(config.seed)
    path = ls.descend(X, y, config.step, max(config.checkpoints))
    fit(ls.equations(X, y, path.iterates[1, :, 0], l2()))  # what only the first call costs
    for t in config.checkpoints:
        theta = path.iterates[t, :, 0]
        law = early_stopping(X, config.step, t)
        began = time.perf_counter()
        exact = fit(ls.equations(X, y, theta, l2()))
        between = time.perf_counter()
        adam, epochs = _adam(2 * X.T @ (X @ theta - y) / len(X), theta, config)
        ended = time.perf_counter()
        scores = score_examples(exact, ls.objective(X, y), l2(), params=ls.point(theta))
        low, high = scores.error_bars().intervals(exact.strengths)["l2"]
        yield {
            "panel": "E",
            "series": "scalar",
            "t": t,
            "value": exact.strengths["l2"],
            "low": low,
            "high": high,
            "explained": exact.explained,
            "rayleigh": float(theta @ law @ theta / (theta @ theta)),
            "trace": float(law.trace()) / len(law),
            "adam": adam,
            "adam_epochs": epochs,
            "exact_seconds": between - began,
            "adam_seconds": ended - between,
        }


def _adam(gradient: Tensor, theta: Tensor, config: Config) -> tuple[float, int]:
    """The published fit: Adam on log λ from λ = 1, mean squared error over the weights.

    ∇L does not depend on λ, so three inner products are all that an epoch needs: far cheaper than
    as published, with a pass over the data each.
    """
    size, squares = len(theta), float(gradient @ gradient)
    inner, norm = float(gradient @ theta), float(theta @ theta)
    log = torch.zeros(1, dtype=theta.dtype)
    log.grad = torch.zeros_like(log)
    optimizer = torch.optim.Adam([log], lr=config.adam_rate)
    best, waited, epoch = math.inf, 0, 0
    while epoch < config.adam_epochs and waited < config.adam_patience:
        strength = math.exp(float(log))
        loss = (squares + 4 * strength * (inner + strength * norm)) / size
        log.grad.fill_(4 * strength * (inner + 2 * strength * norm) / size)
        optimizer.step()
        waited = 0 if loss < best else waited + 1
        best, epoch = min(best, loss), epoch + 1
    return math.exp(float(log)), epoch


def _matrix_rows(panel: str, series: str, matrix: Tensor) -> Iterator[Row]:
    for i, line in enumerate(matrix.tolist()):
        for j, value in enumerate(line):
            yield {"panel": panel, "series": f"{series} matrix", "i": i, "j": j, "value": value}
