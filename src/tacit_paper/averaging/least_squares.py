"""Averages of gradient descent on least squares, direction by direction, beside their law."""

from collections.abc import Iterator

import torch
from torch import Tensor

import tacit
from tacit.regularizers import Regularizer, distance_to
from tacit_paper import Row
from tacit_paper import least_squares as ls
from tacit_paper.averaging.config import Config


def direction_rows(config: Config) -> Iterator[Row]:
    """One row per number of steps, per direction, and for the mean and the last of the iterates.

    Descent with step η on a loss with curvatures h_j ends at θ − θ* = P(θ₀ − θ*) with
    P_j = (1 − ηh_j)^t, and its mean over steps 1…t has the mean of these powers. Both are the
    minima of L + Σ_j λ_j (θ_j − θ₀_j)² with λ_j = h_j P_j / (2(1 − P_j)).
    """
    X, y, start = make_problem(config)
    objective = ls.objective(X, y)
    curvatures = 2 * X.square().mean(0)
    directions = [_one_direction(start, j) for j in range(config.directions)]
    for steps in config.steps:
        powers = (1 - config.step * curvatures) ** torch.arange(1, steps + 1)[:, None]
        path = torch.linalg.lstsq(X, y[:, None]).solution[:, 0] * (1 - powers) + start * powers
        for kind, theta, P in (
            ("mean", path.mean(0), powers.mean(0)),
            ("last", path[-1], powers[-1]),
        ):
            target = tacit.endpoint_target(objective, params=ls.as_params(theta))
            estimates = tacit.fit(target.equations(directions)).strengths
            one = tacit.fit(target.equations(distance_to(ls.as_params(start))))
            ridge = tacit.fit(target.equations(tacit.l2()))
            for j, estimate in enumerate(estimates.values()):
                yield {
                    "kind": kind,
                    "steps": steps,
                    "time": config.step * steps,
                    "curvature": float(curvatures[j]),
                    "strength": estimate,
                    "theory": float(curvatures[j] * P[j] / (1 - P[j]) / 2),
                    "explained_start": one.explained,
                    "explained_ridge": ridge.explained,
                    "strength_start": one.strengths["distance_to"],
                }


def make_problem(config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs with XᵀX/n diagonal, observations, and the start of descent."""
    generator = torch.Generator().manual_seed(0)
    rows, size = 10 * config.directions, config.directions
    low, high = config.curvatures
    exponents = torch.linspace(0, 1, size, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(rows, size, generator=generator).double()).Q
    X = basis * (rows * low * (high / low) ** exponents / 2).sqrt()  # h is twice XᵀX/n
    minimum, start = 3 * torch.randn(2, size, generator=generator).double()
    noise = torch.randn(rows, generator=generator).double()
    return X, X @ minimum + noise, start


def _one_direction(start: Tensor, index: int) -> Regularizer:
    """The squared distance to the start along one direction."""
    return tacit.regularizer(
        f"direction {index}", lambda params: (params["weight"][0, index] - start[index]).square()
    )
