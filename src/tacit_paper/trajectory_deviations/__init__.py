"""Gradient deviations along the trajectory

A network tanh(wx + b) with two weights. (A) Grey: gradient flow. Black: six steps of minibatch SGD.
Orange arrows are the steps of the full gradient, blue arrows the deviations. (B) What penalties
explain of the deviations. For the steps shown it is no more than by chance (grey), and nothing if
one strength has to hold for all draws of the batches: the deviations are noise. The mean of whole
shuffled epochs has the penalty that theory predicts.

With the full batch, the deviation is rounding error and the fit reports 'no signal'. With
minibatches, ∇L_b − ∇L has mean zero at every point, so no penalty has a strength that holds for all
draws. A single draw of six steps is only twelve numbers, and any candidate explains a part of them
by chance.

Over an epoch in which every example is visited once, first-order noise cancels. What is left, in
the mean over orders and against the gradient flow over the same time, is the gradient of
(η/4)(‖∇L‖² + V), where V is the variance of a batch's gradient (Smith et al. 2021). Here the epochs
have small steps, because the prediction is the first order in η. The fit finds both strengths.

The published figure shows the same network and data; its starting point and batches are not stated.
"""

from tacit_paper.trajectory_deviations.checks import check
from tacit_paper.trajectory_deviations.claims import CLAIMS
from tacit_paper.trajectory_deviations.config import PAPER, QUICK, Config
from tacit_paper.trajectory_deviations.estimates import work
from tacit_paper.trajectory_deviations.figure import plot

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "Figure 2"
