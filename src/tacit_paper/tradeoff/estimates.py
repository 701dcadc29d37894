"""Settings and rows of the trade-off figure: curves over θ, and the estimated strength."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tacit
from tacit_paper import Row, Work


@dataclass(frozen=True)
class Config:
    """A ridge regression y = θx + ε with one weight."""

    examples: int = 20
    noise: float = 1.8
    coefficient: float = 2.0
    strength: float = 0.8
    grid: int = 201
    seed: int = 3


PAPER = Config()
QUICK = Config(grid=81)


def work(config: Config, device: str) -> Work:
    """Loss and penalty over θ, and the strength estimated from the gradient at the ridge optimum.

    The minimum of the loss is Σxy/Σx². The ridge optimum, where the derivative of
    (1/n)Σ(y − θx)² + λθ² is zero, is θ = mean(xy) / (mean(x²) + λ).
    """
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(config.examples, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(config.examples, 1, generator=generator, dtype=torch.float64)
    data = (x.to(device), (config.coefficient * x + config.noise * noise).to(device))
    model = nn.Linear(1, 1, bias=False).double().to(device)
    objective = tacit.Objective(model, F.mse_loss, data)
    minimum = float((x * data[1].cpu()).sum() / x.square().sum())
    ridge = float((x * data[1].cpu()).mean() / (x.square().mean() + config.strength))
    return {
        "curves": lambda: _curve_rows(config, objective, minimum),
        "estimate": lambda: [_estimate_row(config, objective, minimum, ridge)],
    }


def _curve_rows(config: Config, objective: tacit.Objective, minimum: float) -> Iterator[Row]:
    for theta in torch.linspace(-1, minimum + 1.5, config.grid).tolist():
        loss = objective.value(_as_params(theta, objective))
        yield {"theta": theta, "loss": loss, "penalty": config.strength * theta**2}


def _estimate_row(config: Config, objective: tacit.Objective, minimum: float, ridge: float) -> Row:
    params = _as_params(ridge, objective)
    fit = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params=params))
    return {
        "theta": ridge,
        "minimum": minimum,
        "loss": objective.value(params),
        "penalty": config.strength * ridge**2,
        "loss_gradient": float(objective.gradient(params)["weight"]),
        "penalty_gradient": 2 * config.strength * ridge,
        "strength": config.strength,
        "estimated": fit.strengths["l2"],
        "explained": fit.explained,
    }


def _as_params(theta: float, objective: tacit.Objective) -> dict[str, Tensor]:
    return {"weight": torch.full_like(objective.params["weight"], theta)}
