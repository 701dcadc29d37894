"""Implicit gradient regularization: the step size as a penalty

Descent with steps η stays close to the flow of the loss plus λ‖∇L‖²/p, λ = ηp/4 (Barrett & Dherin
2021). (A) R_IG = ‖∇L‖²/p and (B) test accuracy against the estimated λ̂: a line per width; hollow
networks fit less than 99 % of the training set. (C) Estimate against prediction. (D) Their ratio:
below 1 with the column of ‖∇L‖², close to 1 with the next term of the flow; grey is least squares.

Networks of many widths were trained with many step sizes, and from each network five full-batch
steps were compared with the flow over the same time. The prediction is the first term of a series
in η times the curvature. With only the column of ‖∇L‖² (open) the ratio therefore lies below 1, by
an amount that depends on the point where training ended as well as on η. With the next term of the
flow as a second column, the change of H∇L along the flow (filled), the ratio is within a few
percent of 1, least well at the largest steps. On least squares the curvature is constant, and the
ratio goes to 1 linearly in η.

Panels A and B compare networks that differ in more than the penalty. The strength contains the
number p of weights and the step size η. Networks with small steps are also trained less far in the
same number of epochs, which gives larger gradients and lower accuracy. Among networks of one width
that fit the training set (filled), accuracy does not follow λ̂.

As published: widths, step sizes, data, splits, batches, epochs, the choice of checkpoints, five
probe steps on 2,048 examples and a flow by ten Runge–Kutta steps. The text leaves three things
open; here the hidden layers have no bias and the last one has, pixels are normalised, and there is
one seed. Different: panel (D) and the second column are added. Networks that never reached 90 % on
the training set have no estimate, as published; here they are named below the panels, and the rows
contain them with the reason. The quick preset uses scikit-learn's digits and smaller networks.
"""

from functools import cache, partial

from tacit_paper import Work, on_one_thread
from tacit_paper.step_size.checks import check
from tacit_paper.step_size.claims import CLAIMS
from tacit_paper.step_size.config import PAPER, QUICK, Config
from tacit_paper.step_size.estimates import least_squares_rows, width_rows
from tacit_paper.step_size.figure import plot
from tacit_paper.step_size.networks import load_data

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "Figure 6"


def work(config: Config, device: str) -> Work:
    """One unit for least squares, and one per width.

    Units run on one thread where the device is the CPU, which is fastest for the small networks of
    `QUICK`. The networks of `PAPER` need a GPU.
    """
    split = cache(partial(load_data, config, device))  # read once, and only if a unit needs it
    units: Work = {"least squares": partial(least_squares_rows, config)}
    for width in config.widths:
        units[f"width {width}"] = lambda width=width: width_rows(config, split(), width)
    return on_one_thread(units)
