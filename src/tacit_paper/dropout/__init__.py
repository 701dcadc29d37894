"""Implicit regularization of dropout

Classifiers with dropout after every hidden layer but the last, one column per architecture. (Top)
As published: the ridge strength at which Adam on log λ, started at λ = 1, ends by its schedule and
stopping rule; colour is its loss. (Second) The exact ridge strength at the same weights from the
same equations, and the fraction of the gradient that it explains. It is many times smaller than the
published one: the published values and their rise with the rate are an artefact of a fit that stops
before it converges. Ridge explains little of the gradient at these weights, and less the higher the
rate. (Third) The marginal effect of dropout: the expected gradient with masks minus the gradient
without them, at the same weights. Shown is the fraction of it that each family explains, free of
the noise of the masks. Ridge explains almost nothing, mostly with a negative coefficient; ridge
weighted by activations, and one strength per layer, little more. The explicit regularizer of Wei,
Kakade & Ma is the right family at small rates and large widths. (Bottom) Its coefficient over the
theory value q/(1−q). Open markers carry a Problem: there the second-order expansion behind the
regularizer has broken down. Both of these rows are at the weights of the best validation loss.
Dotted lines are means at the last weights, after fifty more epochs of overfitting, where the
expansion holds less well. Lines are means over seeds, and bars are their 95 % intervals of
training: over networks that differ in initial weights, batches and masks (t intervals; ten networks
in the second row, six below). They say how far another seed would move a mean, not whether ridge is
the right family. The explained fraction says that.

As published: data split, networks, optimizer, schedule, patience, seeds and the settings of the
fit. Different: the minibatches of the fit are drawn from a few shuffles, and training multiplies
matrices in TF32 on CUDA. The lower three rows are new. Retrained rows: training again from the same
initial weights and through the same batches without dropout, with the explicit regularizer as
estimated at the best weights, with the ridge strength estimated at the last weights, and without a
penalty; their predictions are compared with those of the dropout network's last weights. The quick
preset is a smoke test on small images: its networks are too narrow for the expansion, and its
published fit is cut off at 300 epochs, before its stopping rule ends it.
"""

from functools import partial
from itertools import product

from tacit_paper import Claim, Work
from tacit_paper.dropout.checks import check
from tacit_paper.dropout.config import PAPER, QUICK, Config
from tacit_paper.dropout.estimates import architecture_rows
from tacit_paper.dropout.figure import plot
from tacit_paper.dropout.retraining import retrained_rows

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "Figure 5"
CLAIMS: tuple[Claim, ...] = ()


def work(config: Config, device: str) -> Work:
    """One unit per architecture, and the retrained networks."""
    units: Work = {
        f"{depth} layers of {width}": partial(architecture_rows, config, device, depth, width)
        for depth, width in product(config.depths, config.widths)
    }
    return {**units, "retrained": partial(retrained_rows, config, device)}
