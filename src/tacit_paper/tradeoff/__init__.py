"""Deviations from loss minima contain information about regularization

Ridge regression with one weight. The penalty moves the optimum of loss + penalty away from the
minimum of the loss. At that optimum the gradients of the loss and of the penalty are equal and
opposite (arrows), so the remaining loss gradient determines the strength of the penalty, here
exactly.

The published figure shows the same problem; its random draw is not stated, so the points differ.
"""

from tacit_paper.tradeoff.checks import check
from tacit_paper.tradeoff.claims import CLAIMS
from tacit_paper.tradeoff.estimates import PAPER, QUICK, Config, work
from tacit_paper.tradeoff.figure import plot

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "Figure 1"
