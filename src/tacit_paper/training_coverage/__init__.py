"""Do the error bars of training have the promised coverage?

Elastic nets as in the figure of that name, on new data sets, with new initial weights and batches.
Dots: how often a nominal 95 % interval, from the last five epochs of one run, contained the
strength that was applied, with the 95 % interval of such a count. Crosses: the same for ordinary
least-squares errors. Strengths of 0.1 and 1 are shown.

The mean and drift of each epoch give an estimate of the strengths, and how far these estimates
disagree gives the error bars. The intervals allow for an error that all epochs of a run share: an
example is visited before the mean of its epoch has responded to it, which shifts the estimate of
every epoch alike, by less than a percent here, and does not average out. The size of this allowance
was chosen on other seeds.

Not in the paper.
"""

from functools import partial

from tacit_paper import Claim, Work
from tacit_paper.coverage.checks import check
from tacit_paper.coverage.figure import plot
from tacit_paper.training_coverage.config import PAPER, QUICK, Config
from tacit_paper.training_coverage.estimates import network_rows

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "New"
CLAIMS: tuple[Claim, ...] = ()


def work(config: Config, device: str) -> Work:
    """The units of work, by name."""
    step, stop = config.networks_per_unit, config.first + config.networks
    return {
        f"data sets from {start}": partial(
            network_rows, config, device, seeds=range(start, min(start + step, stop))
        )
        for start in range(config.first, stop, step)
    }
