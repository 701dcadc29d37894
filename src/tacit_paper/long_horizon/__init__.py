"""Implicit gradient regularization over many steps

Gradient descent, the flow of the loss, and the flow of the modified loss L + (η/4)‖∇L‖² start at
the same weights and run for the same time. Lines are the distances of descent from the two flows.
On least squares and in a tanh network descent stays close to the modified flow at every step. In a
ReLU network the modified flow helps little: it is outside the theory, which needs smooth gradients.

In a ReLU network the gradient jumps each time a unit switches on or off for an example, and the
Hessian does not contain these jumps.

As published: the four cases, with their numbers of steps and step sizes. The paper lists these runs
among its computations and shows no figure of them, so this figure is new. What the paper leaves
open is chosen here: least squares starts at zero; the networks start at torch's initial weights,
have hidden layers without bias, and see normalised pixels; everything is computed in float64. The
quick preset uses scikit-learn's digits.
"""

from functools import partial

from tacit_paper import Work, on_one_thread
from tacit_paper.long_horizon.checks import check
from tacit_paper.long_horizon.claims import CLAIMS
from tacit_paper.long_horizon.config import PAPER, QUICK, Config
from tacit_paper.long_horizon.distances import least_squares_rows, network_rows
from tacit_paper.long_horizon.figure import plot

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "New"


def work(config: Config, device: str) -> Work:
    """One unit per case."""
    units: Work = {
        **{
            f"least squares, η = {eta:g}": partial(least_squares_rows, config, eta)
            for eta in config.etas
        },
        **{name: partial(network_rows, config, name, device) for name in config.activations},
    }
    return on_one_thread(units)
