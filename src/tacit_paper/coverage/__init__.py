"""Do the error bars have the promised coverage?

Dots: how often nominal 95 % intervals contained a true value that is known, with the 95 % interval
of such a count. Crosses: the same for ordinary least-squares errors, which treat the equation of
every parameter as an independent observation. Each kind of error bar is tested on the source of
randomness that it is named after: sampling of examples, draws of masks or noise, steps of SGD, and
layers.

Sampling: random parts of a fixed training set at fixed weights; the true value is the strength on
the whole set. Draws: masks or noise at fixed weights; the true value is the mean over all of them.
Steps: SGD with weight decay. Layers: every layer has a different strength; the true value is their
mean. The moving design has a candidate, ‖∇L‖², that depends on the examples itself. The error bars
follow its column to first order. That is accurate while ∇L is larger than its noise (early), and no
longer when ∇L is mostly noise (late).

Not in the paper. Error bars of training have a separate figure.
"""

from collections.abc import Callable
from functools import partial

from tacit_paper import Work
from tacit_paper.coverage import cases
from tacit_paper.coverage.checks import check
from tacit_paper.coverage.claims import CLAIMS
from tacit_paper.coverage.config import PAPER, QUICK, Config
from tacit_paper.coverage.estimates import replicate_rows
from tacit_paper.coverage.figure import plot

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "New"


def work(config: Config, device: str) -> Work:
    """The units of work, by name."""
    examples, part = config.examples, config.part
    make_cases: dict[str, Callable[[], cases.Case]] = {
        "sampling: regression": partial(cases.regression, examples, part),
        "sampling: early": partial(cases.moving_design, examples, part, late=False),
        "sampling: late": partial(cases.moving_design, examples, part, late=True),
        "sampling: digits": partial(cases.digits, examples, part),
        "sampling: transformer": partial(cases.transformer, examples, part),
        "draws: dropout": partial(cases.dropout, config.draws),
        "draws: input noise": partial(cases.input_noise, config.draws, config.many),
        "steps": partial(cases.sgd_steps, config.steps),
        "layers": partial(cases.unequal_layers, config.layers),
    }
    return {
        unit: partial(replicate_rows, config, device, unit=unit, make_case=make_case)
        for unit, make_case in make_cases.items()
    }
