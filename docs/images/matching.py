"""Draw the figure of the README: the loss gradient of a trained network matched by penalties."""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

import tacit

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

from elastic_net import BETA, LASSO, RIDGE, trained_network  # noqa: E402 # needs the path above


def main() -> None:
    """One panel per set of candidates: −∂L/∂θ of every parameter against the fitted penalties."""
    model, data = trained_network()
    objective = tacit.Objective(model, F.mse_loss, data)
    params = objective.params
    target = -torch.cat([g.flatten() for g in objective.gradient().values()])
    panels = {"ridge only": [tacit.l2()], "ridge + smooth L1": [tacit.l2(), tacit.smooth_l1(BETA)]}
    plt.rcParams.update({"font.size": 10})
    figure, axes = plt.subplots(
        1, 2, figsize=(7.6, 3.9), sharex=True, sharey=True, layout="constrained"
    )
    for axis, (title, candidates) in zip(axes, panels.items(), strict=True):
        fit = tacit.fit(tacit.endpoint_equations(objective, candidates))
        fitted = torch.zeros_like(target)
        for regularizer in candidates:
            (column,) = regularizer.gradient(params).values()
            gradient = torch.cat([g.flatten() for g in column.values()])
            fitted += fit.strengths[regularizer.name] * gradient
        limit = 1.05 * float(target.abs().max())
        axis.axline((0, 0), slope=1, color="0.6", linewidth=1, zorder=0)
        axis.scatter(fitted, target, s=10, alpha=0.6, color="#1b6ca8", linewidths=0)
        axis.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
        strengths = "\n".join(f"{n}: λ̂ = {s:.4g}" for n, s in fit.strengths.items())
        axis.set_title(f"{title}: {fit.explained:.0%} explained", fontsize=11)
        axis.text(0.04, 0.96, strengths, transform=axis.transAxes, va="top", fontsize=9)
        axis.set_xlabel("fitted penalty gradient, Σ λ̂ ∂R/∂θ")
    axes[0].set_ylabel("negative loss gradient, −∂L/∂θ")
    figure.suptitle(
        f"A network trained with ridge {RIDGE:g} and smooth L1 {LASSO:g}: one dot per parameter",
        fontsize=11,
    )
    figure.savefig(HERE / "matching.png", dpi=110)


if __name__ == "__main__":
    main()
