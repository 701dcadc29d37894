"""Implicit regularization of dropout

Classifiers with dropout after every hidden layer but the last. (A) The published fit of a ridge
strength ends far above the exact one at the same weights (medians over seeds). (B) What
dropout itself adds: ridge explains none of it, second order only small rates, and
moments of the network's noise most of it at depth 3. (C) Networks trained with a penalty in place
of dropout, against the dropout network. Bars: 95 % intervals over seeds.

Ridge strengths. The exact strength is the least-squares solution of the published fit's own
equations. The magnitude of the published one is an artefact of a fit that stops before it
converges. So is its rise with the rate at depth 3, where the exact strength falls. At depth 5 the
exact strength rises too, but far less, and as a penalty that explains next to nothing of the
gradient at high rates. That the strength falls with width holds exactly.

What dropout adds. The marginal effect is the expected gradient with masks minus the gradient
without them, at the same weights. Explained fractions are free of the noise of the masks. Second
order is the explicit regularizer of Wei, Kakade & Ma, with theory coefficient q/(1−q). Moments
is `dropout_moments`: mean and covariance of the activations are propagated through the network,
and the logits are skewed; its theory coefficient is 1. It is fitted at some of the rates, on five
seeds, and on one at width 512. Ridge weighted by activations, and one strength per layer, explain
little more than ridge. Rows also hold fits of several families jointly, and the cost of a column.

The details figure has one column per architecture. Dots of the first row are coloured by the loss
of the published fit. In the second row, numbers in grey say how much of the gradient the exact
ridge explains. Open markers of the coefficients carry a Problem. Dotted lines are means at the last
weights, after fifty more epochs of overfitting, where the second-order expansion holds less well.
Below are networks with dropout after every hidden layer, trained by Adam on normalised pixels. Bars
say how far another seed would move a mean, not whether a family is the right one; the explained
fraction says that.

Retraining. Same initial weights, same batches, same number of epochs, no dropout. Moments have
coefficient 1 and second order q/(1−q) or its estimate at the best weights; both are computed on a
part of each minibatch, which leaves their mean unchanged. Ridge has its exact or published strength
at the last weights. Shown is KL(dropout network ‖ retrained network) on the test images at the last
weights.

As published: data split, networks, optimizer, schedule, patience, seeds and the settings of the
fit. Different: the minibatches of the fit are drawn from a few shuffles, and training multiplies
matrices in TF32 on CUDA. At depth 1 no dropout layer acts, because dropout follows every hidden
layer but the last; rows of the unit `1 layer` show it. The quick preset is a smoke test on small
images: its networks are too narrow for any expansion, and its published fit is cut off at 300
epochs, before its stopping rule ends it.
"""

from functools import partial
from itertools import product

from tacit_paper import Work
from tacit_paper.dropout.checks import check
from tacit_paper.dropout.claims import CLAIMS
from tacit_paper.dropout.config import PAPER, QUICK, Config
from tacit_paper.dropout.details import plot_details
from tacit_paper.dropout.every_layer import every_layer_rows
from tacit_paper.dropout.figure import plot
from tacit_paper.dropout.retraining import retrained_rows
from tacit_paper.dropout.sweep import architecture_rows, one_layer_rows

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "plot_details", "work"]

FIGURE = "Figure 5"


def work(config: Config, device: str) -> Work:
    """One unit per architecture of either setting, the networks of one layer, and retraining."""
    units: Work = {
        f"{depth} layers of {width}": partial(architecture_rows, config, device, depth, width)
        for depth, width in product(config.depths, config.widths)
    }
    units["1 layer"] = partial(one_layer_rows, config, device)
    for depth, width, rates in config.every_layer.networks:
        units[f"dropout after all {depth} layers of {width}"] = partial(
            every_layer_rows, config, device, depth, width, rates
        )
    return {**units, "retrained": partial(retrained_rows, config, device)}
