"""Recovering explicit regularization

Networks with one hidden layer were trained with a smoothed L1 penalty of strength λ₁ and a ridge
penalty of strength λ₂, six values each, on ten data sets. Both strengths are then estimated from
the trained weights, without using the true values. Lines are medians over data sets. Open markers
are cells whose fits carry a Problem in at least half of the data sets; crosses are medians below
zero. (A, B) Exact least squares at the last weights, after SGD; bars are the middle half of the
data sets. The error comes from the point and not from the estimator: the last weights of a run with
a constant step size are one noisy draw, and not stationary. (C, D) The same runs, estimated from
the means over each of the last five epochs and their drift. This needs no further training, and the
error falls more than tenfold. Bars are 95 % intervals of training, computed from a single run by
how far its five epochs disagree (median ends over data sets). (E to H) Median relative error of
both estimates by cell. At λ₂ = 10 many networks collapse to zero, where the two penalties cannot be
distinguished. At λ₁ = 10 the step is too large for the penalty (η λ₁/β > 2): the weights jump
across its kink at every step, and no single point determines its strength. (I, J) Distance of the
published fit (Adam on log λ), where it stops, from the exact solution of the same equations.

As published: sizes, data, step size, batches, patience and the settings of the published fit.
Different: the text trains with SGD and the authors' code with Adam; the figure shows SGD, and the
rows of the paper preset have both. Early stopping monitors the sum of loss and penalty, because the
published curves require it. Polished rows: minimising the same objective further by L-BFGS from the
last weights gives both strengths to five digits in the median of every cell, so the remaining error
is that of unfinished training. Retrained rows: training again from the same initial weights and
through the same batches, with the true, the estimated and no penalty.
"""

from functools import partial

from tacit_paper import Claim, Work
from tacit_paper.elastic_net.checks import check
from tacit_paper.elastic_net.config import PAPER, QUICK, Config
from tacit_paper.elastic_net.estimates import polished_rows, sweep_rows
from tacit_paper.elastic_net.figure import plot
from tacit_paper.elastic_net.nonsmooth import nonsmooth_rows
from tacit_paper.elastic_net.retraining import retrained_rows

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "Figure 3"
CLAIMS: tuple[Claim, ...] = ()


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
