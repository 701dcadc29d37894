"""Rows of the early-stopping figure: theory, stopped weights, and the estimates from them."""

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from tacit import Objective, endpoint_equations, fit, l2, score_examples, stack
from tacit.regularizers import diagonal, symmetric
from tacit.theory import early_stopping
from tacit.validation import certify_least_squares
from tacit_paper import Row
from tacit_paper import least_squares as ls
from tacit_paper.early_stopping.config import Config


def theory_rows(config: Config) -> Iterator[Row]:
    """Panel A, and the distance between the minimiser under Λ(t) and the iterate after t steps.

    The distance is computed for both conventions of a step: with η on half the mean squared error
    it is rounding, with η on the whole it is not.
    """
    X, _, y = ls.draw(config.seed)
    yield from _matrix_rows("A", "theory", early_stopping(X, config.step, config.stop))
    for series, factor in (("half-MSE step", 1.0), ("MSE step", 2.0)):
        descent = ls.descend(X, y, factor * config.step, max(config.identity))
        for t in config.identity:
            minimiser = ls.penalised_solution(X, y, early_stopping(X, config.step, t))
            distance = ls.relative_error(minimiser, descent.iterates[t, :, 0])
            yield {"panel": "identity", "series": series, "t": t, "value": distance}


def diagonal_rows(config: Config) -> Iterator[Row]:
    """Panel C: weights and penalties on the paper's data set."""
    X, coefficients, y = ls.draw(config.seed)
    stopped, penalty, retrained = _retrain(X, y, config)
    series = {
        "true": coefficients,
        "early-stopped": stopped,
        "retrained": retrained,
        "estimate": penalty.diagonal(),
        "theory": early_stopping(X, config.step, config.stop).diagonal(),
    }
    for name, entries in series.items():
        for i, value in enumerate(entries.tolist()):
            yield {"panel": "C", "series": name, "i": i, "value": value}


def dataset_rows(config: Config, *, start: int) -> Iterator[Row]:
    """Panel C on further data sets: negative entries, and whether a minimum exists."""
    for k in range(start, min(start + config.datasets_per_unit, config.datasets)):
        X, _, y = ls.draw(config.seed + k)
        stopped, penalty, retrained = _retrain(X, y, config)
        certificate = certify_least_squares(X, y, penalty)
        yield {
            "panel": "C",
            "series": "dataset",
            "dataset": k,
            "value": ls.relative_error(retrained, stopped),
            "least_entry": float(penalty.diagonal().min()),
            "least_eigenvalue": min(certificate.eigenvalues),
            "verdict": certificate.verdict,
        }


def _retrain(X: Tensor, y: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Early-stopped weights, the diagonal penalty (p×p) estimated from them, and weights under it.

    The last are trained with that penalty and without early stopping.
    """
    stopped = ls.descend(X, y, config.step, config.stop).iterates[-1, :, 0]
    penalty = fit(ls.equations(X, y, stopped, diagonal())).matrix()
    return stopped, penalty, ls.penalised_solution(X, y, penalty)


def fixed_pool_rows(config: Config, *, pool: int) -> Iterator[Row]:
    """Panel B: endpoints that all stop at the same step, trained in float64 and in float32."""
    X, Y, objectives = _draw_pool(config, pool)
    theory = early_stopping(X, config.step, config.stop)
    for series, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        thetas = ls.descend(X, Y, config.step, config.stop, dtype).iterates[-1]
        for row, matrix in _estimates(config, objectives, thetas, theory):
            yield {"panel": "B", "series": series, "pool": pool, **row}
            if series == "float64" and pool == 0 and row["m"] == X.shape[1]:
                yield from _matrix_rows("B", "estimate", matrix)


def variable_pool_rows(config: Config, *, pool: int) -> Iterator[Row]:
    """Panel D: endpoints that stop at different steps, by the published rule and by the text's.

    The error is measured against the entrywise median of the endpoints' Λ(t).
    """
    X, Y, objectives = _draw_pool(config, pool)
    descents = {
        dtype: ls.descend(X, Y, config.step, config.cap, dtype)
        for dtype in (torch.float64, torch.float32)
    }
    # Λ(t) depends on X only through XᵀX/n. These p rows have the same XᵀX/n and cost less.
    compressed = torch.linalg.qr(X).R * math.sqrt(X.shape[1] / len(X))
    rules = (
        ("min_delta", torch.float64, config.min_delta),
        ("text float64", torch.float64, 0.0),
        ("text float32", torch.float32, 0.0),
    )
    for series, dtype, min_delta in rules:
        descent = descents[dtype]
        times = ls.stopping_times(descent.losses, patience=config.patience, min_delta=min_delta)
        thetas = torch.stack([descent.iterates[t, :, k] for k, t in enumerate(times)], dim=1)
        penalties = {t: early_stopping(compressed, config.step, t) for t in set(times)}
        median = torch.stack([penalties[t] for t in times]).quantile(0.5, dim=0)
        for row, _ in _estimates(config, objectives, thetas, median):
            yield {"panel": "D", "series": series, "pool": pool, **row}
        for k, t in enumerate(times):
            yield {"panel": "D", "series": f"{series} stops", "pool": pool, "endpoint": k, "t": t}


def _draw_pool(config: Config, pool: int) -> tuple[Tensor, Tensor, list[Objective]]:
    """Inputs, the observations of a pool's endpoints (columns), and the objective of each."""
    X = ls.draw(config.seed).X
    Y = ls.draw_pool(X, pool, max(config.endpoints), seed=config.seed)
    return X, Y, [ls.objective(X, y) for y in Y.T]


def _estimates(
    config: Config, objectives: list[Objective], thetas: Tensor, truth: Tensor
) -> Iterator[tuple[Row, Tensor]]:
    """For every m, the estimate from the first m endpoints (columns of thetas), its error and rank.

    The expected rank is mp − m(m − 1)/2 for m ≤ p: the equations of two endpoints of one symmetric
    Λ share one linear dependence, θᵢᵀΛθⱼ = θⱼᵀΛθᵢ.
    """
    equations = [
        endpoint_equations(objective, symmetric(), params=ls.as_params(theta))
        for objective, theta in zip(objectives, thetas.T, strict=True)
    ]
    for m in config.endpoints:
        pooled = fit(stack(equations[:m]))
        independent = min(m, len(truth))
        expected = independent * len(truth) - independent * (independent - 1) // 2
        error = ls.relative_error(pooled.matrix(), truth)
        row = {"m": m, "value": error, "rank": pooled.rank, "rank_expected": expected}
        yield row, pooled.matrix()


def scalar_rows(config: Config) -> Iterator[Row]:
    """Panel E: one ridge strength at every checkpoint, exactly and by the published fit."""
    X, _, y = ls.draw(config.seed)
    descent = ls.descend(X, y, config.step, max(config.checkpoints))
    # A first fit, not timed, takes the costs that only the first call has.
    fit(ls.equations(X, y, descent.iterates[1, :, 0], l2()))
    for t in config.checkpoints:
        theta = descent.iterates[t, :, 0]
        penalty = early_stopping(X, config.step, t)
        exact_start = time.perf_counter()
        exact = fit(ls.equations(X, y, theta, l2()))
        adam_start = time.perf_counter()
        adam, epochs = _published_fit(2 * X.T @ (X @ theta - y) / len(X), theta, config)
        adam_end = time.perf_counter()
        low, high = score_examples(exact).error_bars().intervals(exact.strengths)["l2"]
        yield {
            "panel": "E",
            "series": "scalar",
            "t": t,
            "value": exact.strengths["l2"],
            "low": low,
            "high": high,
            "explained": exact.explained,
            "rayleigh": float(theta @ penalty @ theta / (theta @ theta)),
            "trace": float(penalty.trace()) / len(penalty),
            "adam": adam,
            "adam_epochs": epochs,
            "exact_seconds": adam_start - exact_start,
            "adam_seconds": adam_end - adam_start,
        }


def _published_fit(gradient: Tensor, theta: Tensor, config: Config) -> tuple[float, int]:
    """The published fit: Adam on log λ from λ = 1. Returns λ and the number of epochs.

    It minimises the mean over the p weights of (∇L + 2λθ)², which is

        (‖∇L‖² + 4λ ∇Lᵀθ + 4λ² ‖θ‖²) / p,   with derivative (4λ ∇Lᵀθ + 8λ² ‖θ‖²) / p in log λ.

    ∇L does not depend on λ, so an epoch needs only three inner products, where the published code
    passes over the data.
    """
    size, squared_gradient = len(theta), float(gradient @ gradient)
    inner, squared_norm = float(gradient @ theta), float(theta @ theta)
    log_strength = torch.zeros(1, dtype=theta.dtype)
    log_strength.grad = torch.zeros_like(log_strength)
    optimizer = torch.optim.Adam([log_strength], lr=config.adam_rate)
    best, waited, epoch = math.inf, 0, 0
    while epoch < config.adam_epochs and waited < config.adam_patience:
        strength = math.exp(float(log_strength))
        loss = (squared_gradient + 4 * strength * (inner + strength * squared_norm)) / size
        log_strength.grad.fill_(4 * strength * (inner + 2 * strength * squared_norm) / size)
        optimizer.step()
        waited = 0 if loss < best else waited + 1
        best, epoch = min(best, loss), epoch + 1
    return math.exp(float(log_strength)), epoch


def _matrix_rows(panel: str, series: str, matrix: Tensor) -> Iterator[Row]:
    for i, entries in enumerate(matrix.tolist()):
        for j, value in enumerate(entries):
            yield {"panel": panel, "series": f"{series} matrix", "i": i, "j": j, "value": value}
