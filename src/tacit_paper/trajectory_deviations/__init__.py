"""Gradient deviations along the trajectory

A network tanh(wx + b) with two weights. Grey: gradient flow (full-batch descent with very small
steps). Black: six steps of minibatch SGD. The orange arrow at each point is the step that the full
gradient would take; the blue arrow is the deviation from it, which trajectory equations match with
the gradients of regularizers. Here the deviation comes only from the sampling of the minibatch:
with the full batch it is rounding error, and the fit reports 'no signal'. The published figure
shows the same network and data; its starting point and batches are not stated.
"""

from tacit_paper import Claim
from tacit_paper.trajectory_deviations.checks import check
from tacit_paper.trajectory_deviations.estimates import PAPER, QUICK, Config, work
from tacit_paper.trajectory_deviations.figure import plot

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "Figure 2"
CLAIMS: tuple[Claim, ...] = ()
