"""Does a fit without a Problem deserve trust?

Ten problems whose candidates are those that were applied, and ten whose fit is wrong for a known
reason. Above: how often a fit of a well-specified problem reports any Problem, a false alarm.
Below: how often a fit of a misspecified problem reports the kind that is listed for it. Lines are
95 % intervals of these counts; shaded is what is promised: at most 5 % false alarms, and at least
90 % power.

Every seed has new data, initial weights and batches. The misspecified problems are everyday
mistakes: a penalty that is missing or of another family, a wrong scope, an optimizer whose decay is
not ridge, padding in the mean, clipping, and estimates that are taken too early.

Not in the paper.
"""

from functools import partial

from tacit_paper import Claim, Work, on_one_thread
from tacit_paper.trust.cases import CASES
from tacit_paper.trust.checks import check
from tacit_paper.trust.config import PAPER, QUICK, Config
from tacit_paper.trust.estimates import replicate_rows
from tacit_paper.trust.figure import plot

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "New"
CLAIMS: tuple[Claim, ...] = ()


def work(config: Config, device: str) -> Work:
    """The units of work, by name: one per problem."""
    return on_one_thread({label: partial(replicate_rows, config, label) for label in CASES})
