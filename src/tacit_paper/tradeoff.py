"""The idea in one dimension: at a ridge optimum the two gradients are equal and opposite."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

import tacit
from tacit_paper import Check, Row, Table, pending, plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLE = "Deviations from loss minima contain information about regularization"
CAPTION = (
    "Ridge regression with one weight. The penalty pulls the optimum of loss + penalty away "
    "from the loss's own minimum. There the two gradients are equal and opposite (arrows): the "
    "loss gradient that is left over tells the strength of the penalty, here exactly. The "
    "published figure draws the same problem; its random draw is not given, so the points "
    "differ."
)


@dataclass(frozen=True)
class Config:
    """One scalar ridge regression, y = θx + ε."""

    examples: int = 20
    noise: float = 1.8
    coefficient: float = 2.0
    strength: float = 0.8
    grid: int = 201
    seed: int = 3


PAPER = Config()
QUICK = Config(grid=81)


def units(config: Config) -> list[str]:
    """One for the curves and one for the estimate."""
    return ["curves", "estimate"]


def run(config: Config, *, finished: Collection[str] = (), device: str = "cpu") -> Iterator[Row]:
    """Loss, penalty and their sum over θ; and the strength that the optimum's gradient tells."""
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(config.examples, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(config.examples, 1, generator=generator, dtype=torch.float64)
    data = (x.to(device), (config.coefficient * x + config.noise * noise).to(device))
    model = nn.Linear(1, 1, bias=False).double().to(device)
    objective = tacit.Objective(model, F.mse_loss, data)
    minimum = float((x * data[1].cpu()).sum() / x.square().sum())
    ridge = float((x * data[1].cpu()).mean() / (x.square().mean() + config.strength))

    def at(theta: float) -> dict[str, torch.Tensor]:
        return {"weight": torch.full((1, 1), theta, dtype=torch.float64, device=device)}

    for unit in pending(units(config), finished):
        if unit == "curves":
            for theta in torch.linspace(-1, minimum + 1.5, config.grid).tolist():
                loss, penalty = objective.value(at(theta)), config.strength * theta**2
                yield {"unit": unit, "theta": theta, "loss": loss, "penalty": penalty}
        else:
            found = tacit.fit(tacit.endpoint_equations(objective, [tacit.l2()], params=at(ridge)))
            yield {
                "unit": unit,
                "theta": ridge,
                "minimum": minimum,
                "loss": objective.value(at(ridge)),
                "penalty": config.strength * ridge**2,
                "loss_gradient": float(objective.gradient(at(ridge))["weight"]),
                "penalty_gradient": 2 * config.strength * ridge,
                "strength": config.strength,
                "estimated": found.strengths["l2"],
                "explained": found.explained,
            }


def check(rows: Table) -> list[Check]:
    """The strength comes back, and the gradients cancel."""
    (point,) = rows[rows.unit == "estimate"].to_dict("records")
    error = abs(point["estimated"] / point["strength"] - 1)
    left = abs(point["loss_gradient"] + point["penalty_gradient"])
    return [
        Check("relative error of the strength", error, "≤ 1e-10", error <= 1e-10),
        Check("|∇L + ∇R| at the ridge optimum", left, "≤ 1e-12", left <= 1e-12),
    ]


def plot(rows: Table) -> "Figure":
    """Three curves and two arrows."""
    curves = rows[rows.unit == "curves"]
    (point,) = rows[rows.unit == "estimate"].to_dict("records")
    with plots.style():
        figure = plots.new_figure(5.6, 3.7)
        axis = figure.subplots()
        total = curves.loss + curves.penalty
        axis.plot(curves.theta, curves.loss, color=plots.RED, label="loss L (mean squared error)")
        axis.plot(
            curves.theta,
            curves.penalty,
            color=plots.BLUE,
            label=f"penalty R = {point['strength']:g} θ²",
        )
        axis.plot(curves.theta, total, color="black", label="L + R")
        height = point["loss"] + point["penalty"]
        axis.plot(point["theta"], height, "o", color="black", markersize=5, zorder=4)
        forces = (("loss", "L", plots.RED, "left"), ("penalty", "R", plots.BLUE, "right"))
        for key, letter, color, side in forces:
            force = -point[f"{key}_gradient"]
            tip = (point["theta"] + 0.6 * force, height)
            arrow = {"arrowstyle": "-|>", "color": color, "lw": 2.5, "shrinkA": 0, "shrinkB": 0}
            axis.annotate("", tip, (point["theta"], height), arrowprops=arrow, zorder=3)
            words = f" −∇{letter} = {force:+.3f} ".replace("-", "−")
            paper = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1}
            axis.text(*tip, words, color=color, ha=side, va="center", fontweight="bold", bbox=paper)
        axis.axvline(point["theta"], color=plots.GREY, linestyle=":", linewidth=1)
        axis.axvline(point["minimum"], color=plots.GREY, linestyle="--", linewidth=1)
        top = float(total.max())
        axis.text(point["theta"], top, " ridge\n optimum", va="top", ha="right", color=plots.GREY)
        axis.text(point["minimum"], top, " minimum of\n the loss", va="top", color=plots.GREY)
        axis.set(xlabel="weight θ", ylabel="objective", ylim=(0, top * 1.02))
        axis.set_title(
            f"At the ridge optimum two forces balance: λ̂ = {point['estimated']:.3f} of "
            f"{point['strength']:g} applied"
        )
        axis.legend(loc="center left", bbox_to_anchor=(0.0, 0.72))
    return figure
