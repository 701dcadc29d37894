"""Known laws, recovered

Every line is a training technique whose penalty and coefficient are known. A small model is trained
or compared with it, and the coefficient is estimated without being told. Points are
estimate/theory, lines 95 % intervals where theory is compared with random draws. Filled points are
of laws that hold exactly, hollow ones of laws that hold in the limit of a small parameter, whose
order of convergence is measured too.

The laws are from papers or by a short derivation. An estimator that is wrong in a sign, a factor or
a convention misses every law that goes through it.

Not in the paper.
"""

from functools import partial

from tacit_paper import Claim, Work, on_one_thread
from tacit_paper.laws import dropout, endpoints, forces, noise, objectives, optimizers
from tacit_paper.laws.checks import check
from tacit_paper.laws.config import PAPER, QUICK, Config
from tacit_paper.laws.figure import plot
from tacit_paper.laws.law import law_rows, laws_in

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "SECTIONS", "Config", "check", "plot", "work"]

FIGURE = "New"
CLAIMS: tuple[Claim, ...] = ()

SECTIONS = {
    "steps of finite size": optimizers,
    "forces beside the gradient": forces,
    "sharpness and noise": noise,
    "dropout": dropout,
    "losses, labels and examples": objectives,
    "where training ends": endpoints,
}
"""The laws, by what they are about."""


def work(config: Config, device: str) -> Work:
    """The units of work, by name: one per law."""
    seeds = range(config.first, config.first + config.seeds)
    options = {"seeds": seeds, "more_draws": config.more_draws}
    return on_one_thread(
        {
            law.name: partial(law_rows, law, section, **options)
            for section, module in SECTIONS.items()
            for law in laws_in(module)
        }
    )
