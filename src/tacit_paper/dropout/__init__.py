"""Implicit regularization of dropout

Classifiers with dropout after every hidden layer but the last. (A) The published fit of a ridge
strength ends far above the exact one at the same weights (medians over seeds). (B) The exact ridge
explains little of the gradient, and next to nothing at high rates. (C) What dropout itself adds:
ridge explains none of it, the second-order penalty of dropout only small rates. Bars: 95 %
intervals over seeds. The next figure explains the high rates.

Ridge strengths. The exact strength is the least-squares solution of the published fit's own
equations. The magnitude of the published one is an artefact of a fit that stops before it
converges. So is its rise with the rate at depth 3, where the exact strength falls. At depth 5 the
exact strength rises too, but far less, and as a penalty that explains next to nothing of the
gradient at high rates. That the strength falls with width holds exactly.

What dropout adds. The marginal effect is the expected gradient with masks minus the gradient
without them, at the same weights. Explained fractions are free of the noise of the masks. Second
order is the explicit regularizer of Wei, Kakade & Ma, with theory coefficient q/(1−q). Ridge
weighted by activations, and one strength per layer, explain little more than ridge.

The details figure has one column per architecture. Dots of the first row are coloured by the loss
of the published fit. In the second row, numbers in grey say how much of the gradient the exact
ridge explains. Open markers of the coefficients carry a Problem. Dotted lines are means at the last
weights, after fifty more epochs of overfitting, where the second-order expansion holds less well.
Bars say how far another seed would move a mean, not whether a family is the right one; the
explained fraction says that.

As published: data split, networks, optimizer, schedule, patience, seeds and the settings of the
fit. Different: the minibatches of the fit are drawn from a few shuffles, and training multiplies
matrices in TF32 on CUDA. The quick preset is a smoke test on small images: its networks are too
narrow for any expansion, and its published fit is cut off at 300 epochs, before its stopping rule
ends it.
"""

from functools import partial
from itertools import product

from tacit_paper import Work
from tacit_paper.dropout.checks import check
from tacit_paper.dropout.claims import CLAIMS
from tacit_paper.dropout.config import PAPER, QUICK, Config
from tacit_paper.dropout.details import plot_details
from tacit_paper.dropout.figure import plot
from tacit_paper.dropout.sweep import architecture_rows

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "plot_details", "work"]

FIGURE = "Figure 5"


def work(config: Config, device: str) -> Work:
    """One unit per architecture."""
    return {
        f"{depth} layers of {width}": partial(architecture_rows, config, device, depth, width)
        for depth, width in product(config.depths, config.widths)
    }
