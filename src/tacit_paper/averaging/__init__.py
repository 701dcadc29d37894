"""Averaging the weights of SGD pulls them to where averaging started

The mean of the iterates of t steps of size η (stochastic weight averaging) acts like a penalty
λ‖θ − θ₀‖² on the distance to its start. (A) Least squares: λ lies between 1/(2ηt) and 1/(ηt) in
every direction (shaded), unlike that of the last iterate. (B, C) Networks on digits: the same
strength, and one number explains most of −∇L; ridge does not. (D) Minimising the loss with this
penalty ends near the averaged weights.

Not in the paper. Why one strength is enough: the steps of descent add up, θ₀ − θ_t = η Σ ∇L(θ_k).
On a quadratic loss the mean of the gradients is the gradient at the mean, so that
−∇L(mean) = (θ_t − θ₀)/(ηt). Along a direction that has settled, θ_t − θ₀ equals mean − θ₀, and
2λ = 1/(ηt); along one that has hardly moved it is twice as large, and 2λ = 2/(ηt). The last iterate
of the same run, which is early stopping, has λ_j = h/(2(e^{hηt} − 1)): no single strength serves
directions of different curvature h.

Exactly, the law is ½(θ − θ₀)ᵀQ(θ − θ₀) with Q = H P(1 − P)⁻¹, where P is the mean of (1 − ηH)^k
over k = 1…t. In (A) lines are this law in the limit of small steps, and points are estimates by
direction. In networks the loss is not quadratic and the batches are noisy, so the pull explains
less than everything, and less for long averages; the fit says so by the Problem 'unexplained'. Bars
in (B) are the range over layers of one strength per layer. Fitted together with the pull, ridge
gets next to nothing.

The networks have two hidden layers of tanh units and are trained on scikit-learn's digits, with a
constant step and batches of 32, from ten random seeds at the full size. Distances in (D) are
relative to that between the averaged weights and the start. The network without a penalty has no
minimum; it is shown after the same number of iterations.
"""

from functools import partial

from tacit_paper import Claim, Work, on_one_thread
from tacit_paper.averaging.checks import check
from tacit_paper.averaging.config import PAPER, QUICK, Config
from tacit_paper.averaging.figure import plot
from tacit_paper.averaging.least_squares import direction_rows
from tacit_paper.averaging.networks import network_rows

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "New"
CLAIMS: tuple[Claim, ...] = ()


def work(config: Config, device: str) -> Work:
    """One unit for least squares, and one per network.

    `device` is ignored: everything is small, and computed in float64 on the CPU.
    """
    units: Work = {"least squares": partial(direction_rows, config)}
    for seed in range(config.seeds):
        units[f"network {seed}"] = partial(network_rows, config, seed)
    return on_one_thread(units)
