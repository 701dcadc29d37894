"""The table of problems: what was applied, and which kind of Problem is listed."""

from collections.abc import Callable
from typing import NamedTuple

from tacit import Fit
from tacit.errors import ProblemKind
from tacit_paper.trust import misspecified, well_specified
from tacit_paper.trust.well_specified import STEP


class Case(NamedTuple):
    """A problem whose answer is known."""

    make_fit: Callable[[int], Fit]
    """Makes the fit of a seed."""
    truth: float
    """The strength of the first candidate that was applied."""
    listed: str = ""
    """The kind of Problem that must be reported; empty for well-specified problems."""


WELL_SPECIFIED = {
    "ridge": Case(well_specified.ridge, 0.01),
    "ridge of weights without biases": Case(well_specified.ridge_of_matrices, 0.01),
    "ridge and smooth L1": Case(well_specified.elastic_net, 0.01),
    "a layer that is used twice": Case(well_specified.shared_layer, 0.01),
    "dropout, from 256 draws": Case(well_specified.dropout, 0.25),
    "implicit Euler, −η/4": Case(well_specified.implicit_euler, -STEP / 4),
    "60 steps of SGD, momentum 0.9": Case(well_specified.momentum, 0.2),
    "epochs of SGD": Case(well_specified.epochs, 0.01),
    "epochs of AdamW, cosine": Case(well_specified.adamw, 0.15),
    "epochs of SGD, batch norm, cosine": Case(well_specified.batch_norm, 0.025),
}
UNEXPLAINED, UNSETTLED = ProblemKind.UNEXPLAINED, ProblemKind.UNSETTLED
MISSPECIFIED = {
    "ridge and L1, asked for ridge": Case(misspecified.missing_l1, 0.01, UNEXPLAINED),
    "ridge of weights, asked of all": Case(misspecified.biases_too, 0.01, UNEXPLAINED),
    "smooth L1, asked for ridge": Case(misspecified.smooth_l1_as_ridge, 0.0, UNEXPLAINED),
    "L1 by subgradient steps": Case(misspecified.nearly_zero, 0.2, UNSETTLED),
    "epochs of AdamW, asked for ridge": Case(misspecified.adamw_as_ridge, 0.15, UNEXPLAINED),
    "epochs of ridge and smooth L1, asked for ridge": Case(
        misspecified.missing_smooth_l1, 0.01, UNEXPLAINED
    ),
    "padding counted as data": Case(misspecified.padding, 0.01, ProblemKind.OBJECTIVE),
    "epochs with decay by layer, asked for one": Case(
        misspecified.decay_by_layer, 0.01, UNEXPLAINED
    ),
    "the first epochs of Adam": Case(misspecified.young_adam, 0.01, UNSETTLED),
    "clipped gradients": Case(misspecified.clipping, 0.2, ProblemKind.OBJECTIVE),
}
CASES = WELL_SPECIFIED | MISSPECIFIED
"""All problems by label, the well-specified ones first."""
