"""Screening: penalties that nobody named are found, and none where there is none

Each row is a kind of network whose penalties are known (grey text). A dot is one network: the part
of what is to be explained that the screen's choice explains, blue where the screen calls it the
answer, orange where it calls it aligned, a grey cross where it claims nothing. To the right, how
often it chose right. Below, how often four methods pick a candidate in simulated equations where
none acts.

A screen is given the target, the initial weights and the optimizer, and no name of a candidate. It
is right if it confirms the group that was applied, and has the applied candidate in front. The two
kinds with "no penalty" are right if nothing is claimed. Descent that was stopped early has no
penalty either: what aligns with it (mostly the distance to the start) is not called the answer.

Endpoints are minima by L-BFGS, or by proximal descent, with 16 layers; AdamW has ten averaged
epochs of minibatches. Label smoothing and dropout are differences at ten layers.

In the simulation, eight candidates of correlation 0.5 have a response of mean zero in each of 12
layers: other causes, that differ between layers. AIC and BIC count every parameter as an
observation.

Not in the paper.
"""

from functools import partial

from tacit_paper import Claim, Work, on_one_thread
from tacit_paper.screening.checks import check
from tacit_paper.screening.config import PAPER, QUICK, Config
from tacit_paper.screening.estimates import cost_rows, network_rows, simulation_rows
from tacit_paper.screening.figure import plot
from tacit_paper.screening.networks import PENALISED, WITHOUT

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "New"
CLAIMS: tuple[Claim, ...] = ()


def work(config: Config, device: str) -> Work:
    """One unit per kind of network, then the simulation and the cost."""
    units: Work = {
        name: partial(network_rows, config, name, make, config.repeats)
        for name, make in PENALISED.items()
    }
    units |= {
        name: partial(network_rows, config, name, make, config.seeds)
        for name, make in WITHOUT.items()
    }
    units |= {"simulation": partial(simulation_rows, config), "cost": partial(cost_rows, config)}
    return on_one_thread(units)
