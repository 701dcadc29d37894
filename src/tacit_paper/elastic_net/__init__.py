"""Recovering explicit regularization

Networks with one hidden layer were trained with a smoothed L1 penalty λ₁ and a ridge penalty λ₂ on
ten data sets. (A, C) As published: Adam's fit at the last weights; bars are standard errors. (B, D)
The same runs, fitted exactly to means over the last five epochs and their drift; bars are 95 %
intervals of one run, open markers carry a Problem. At λ₂ = 10 networks collapse to zero, where the
penalties look alike.

The details show median errors by cell. (A, D) The exact fit at the last weights is hardly better
than the published one: the last weights of a run with a constant step size are one noisy draw, and
not stationary. (B, E) Means over epochs need no further training. The error falls more than tenfold
in 35 of 36 cells for either strength; the median over cells is 103-fold for λ₁ and 63-fold for λ₂.
At λ₁ = 10 the step is too large for the penalty (ηλ₁/β > 2): the weights jump across its kink at
every step, and no single point determines λ₁, but the means do. (C, F) Distance of the published
fit, where it stops, from the exact solution of the same equations.

(G) The text says that the L1 penalty failed without smoothing, likely because it hinders
optimisation and biases weights to zero. Trained with |θ| itself, the networks do not yield λ₁ at
their last weights. The cause is the choice of the point: a weight that the penalty holds at zero
jumps across zero by about ηλ₁ at every step, so that its sign is noise. Without the weights near
zero, half or more of λ₁ comes back; from mean signs over epochs, all of it. Training takes as many
epochs as with smoothing. Ticks say which share of the weights had both signs within one epoch.

As published: sizes, data, step size, batches, patience and the settings of the published fit.
Different: the text trains with SGD and the authors' code with Adam; the figure shows SGD, and the
rows of the paper preset have both. Early stopping monitors the sum of loss and penalty, because the
published curves require it. Polished rows: minimising the same objective further by L-BFGS from the
last weights gives both strengths to five digits in the median of every cell, so the remaining error
is that of unfinished training. Retrained rows: training again from the same initial weights and
through the same batches, with the true, the estimated and no penalty.
"""

from functools import partial

from tacit_paper import Work
from tacit_paper.elastic_net.checks import check
from tacit_paper.elastic_net.claims import CLAIMS
from tacit_paper.elastic_net.config import PAPER, QUICK, Config
from tacit_paper.elastic_net.details import plot_details
from tacit_paper.elastic_net.estimates import polished_rows, sweep_rows
from tacit_paper.elastic_net.figure import plot
from tacit_paper.elastic_net.nonsmooth import nonsmooth_rows
from tacit_paper.elastic_net.retraining import retrained_rows

__all__ = [
    "CLAIMS",
    "FIGURE",
    "PAPER",
    "QUICK",
    "Config",
    "check",
    "plot",
    "plot_details",
    "work",
]

FIGURE = "Figure 3"


def work(config: Config, device: str) -> Work:
    """The units of work, by name."""
    step = config.polished_per_unit
    groups = [range(s, min(s + step, config.seeds)) for s in range(0, config.seeds, step)]
    return {
        **{name: partial(sweep_rows, config, device, optimizer=name) for name in config.optimizers},
        **{
            f"polished {g[0]} to {g[-1]}": partial(polished_rows, config, device, seeds=g)
            for g in groups
        },
        "nonsmooth": partial(nonsmooth_rows, config, device),
        "retrained": partial(retrained_rows, config, device),
    }
