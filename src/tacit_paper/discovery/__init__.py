"""Penalties that nobody named: their shapes are found without being told

Each panel has s′ of a penalty Σ s(θ_i), as `spline` finds it from gradients of the loss at trained
weights (blue, with its 95 % band over replicates), above the law that is known (grey). (a) Ridge
and smooth L1, with two kinks. (b) Gradient descent on β = u² − v². (c) AdamW on the full batch. (d)
A penalty λΣ|θ|^p, in logarithms. Ticks are weights of the first replicate.

(a) The kinks are at ±β = ±0.3. (b) From u = v = α the law is ¼·arcsinh(β/2α²), by the gradients
added up along the path; the panel says what ridge would explain of them. (c) The law is ε·wθ/(1 −
w|θ|), which has no bound on s′ but one on weights, 1/w. (d) The exponent is the slope of s′ in
logarithms, plus 1.

Not in the paper. The spline of every panel has the same settings, and the candidates contain no
other penalty.
"""

from functools import partial

from tacit_paper import Claim, Work, on_one_thread
from tacit_paper.discovery.checks import check
from tacit_paper.discovery.config import PAPER, QUICK, Config
from tacit_paper.discovery.estimates import curve_rows
from tacit_paper.discovery.figure import plot
from tacit_paper.discovery.panels import PANELS

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "New"
CLAIMS: tuple[Claim, ...] = ()


def work(config: Config, device: str) -> Work:
    """The units of work, by name: one per panel."""
    return on_one_thread({name: partial(curve_rows, config, name) for name in PANELS})
