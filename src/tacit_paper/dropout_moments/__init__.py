"""Dropout at every rate

What dropout itself adds to the gradient: ridge explains none of it, the second-order penalty
only small rates, and `dropout_moments` most of it. (A) The paper's networks. (B) Networks with
dropout after every hidden layer. (C) Networks trained with a penalty in place of dropout: how far
their predictions are from those of the dropout network. Bars: 95 % intervals over seeds; of two
seeds (dashed), their range.

What dropout adds is the expected gradient with masks minus the gradient without them, at the
weights of the best validation loss. It is measured over the first training images, because a column
by moments costs hundreds of gradient passes; on fewer or more images the fractions are the same.
They are free of the noise of the masks.

Second order is the explicit regularizer of Wei, Kakade & Ma, whose theory coefficient is q/(1−q).
Its expansion in the noise of the masks diverges as the rate grows. `dropout_moments` propagates
mean, covariance and third cumulants of the activations through the network and takes the expected
loss of skewed outputs with these moments; it has no parameter, and its theory coefficient is 1.

It explains least at five hidden layers and q = 0.5. There the noise of the outputs has heavier
tails: in one network of 5×256 with dropout after every layer the mean excess kurtosis of the
outputs is 1.8, against 0.5 to 0.6 in networks that are explained well, and the penalty knows only
three moments.

Retraining. Same initial weights, same batches, same number of epochs, no dropout; stars are
networks with dropout through other batches and masks, which no penalty can be closer than. Networks
that diverge, as second order makes at q = 0.5, are left out. Moments have
coefficient 1 and second order q/(1−q) or its estimate at the best weights; both are computed on a
part of each minibatch, which leaves their mean unchanged. Ridge has its exact or published strength
at the last weights. Shown is KL(dropout network ‖ retrained network) on the test images at the last
weights. These networks learn from fewer images than the paper's.

At depth 1, which the paper mentions, no dropout layer acts, because dropout follows every hidden
layer but the last; rows of the unit `1 layer` show it. In the details figure, costs are those of
one network on the device of the rows. The quick preset is a smoke test on small images.
"""

from functools import partial

from tacit_paper import Work
from tacit_paper.dropout_moments.checks import check
from tacit_paper.dropout_moments.claims import CLAIMS
from tacit_paper.dropout_moments.config import PAPER, QUICK, Config
from tacit_paper.dropout_moments.details import plot_details
from tacit_paper.dropout_moments.figure import plot
from tacit_paper.dropout_moments.networks import every_layer_rows, one_layer_rows, paper_rows
from tacit_paper.dropout_moments.retraining import retrained_rows

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "plot_details", "work"]

FIGURE = "Figure 5, continued"


def work(config: Config, device: str) -> Work:
    """One unit per shape and rate of either setting, one layer, and retraining at each rate."""
    units: Work = {}
    for shape in config.networks:
        for rate in shape.rates:
            name = f"{shape.depth} layers of {shape.width}, q = {rate:g}"
            units[name] = partial(paper_rows, config, device, shape, rate)
    for shape in config.every_layer.networks:
        for rate in shape.rates:
            name = f"dropout after all {shape.depth} layers of {shape.width}, q = {rate:g}"
            units[name] = partial(every_layer_rows, config, device, shape, rate)
    units["1 layer"] = partial(one_layer_rows, config, device)
    for rate in config.retraining.networks.rates:
        units[f"retrained, q = {rate:g}"] = partial(retrained_rows, config, device, rate)
    return units
