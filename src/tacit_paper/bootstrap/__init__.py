"""Bootstrap recovery of the early-stopped regularizer

Training is repeated on resamples of one data set, and the equations of m endpoints are stacked to
estimate the penalty Λ(500) of early stopping. (A) Theory. (B) One endpoint. (C, D) The pairs
bootstrap. (E, F) Distance to theory against m and against the noise σ, in units of ‖Λ‖: the
estimate Λ̂ = 0 has distance 1. Resampling pairs helps only where noise is large; resampling
residuals (orange) is exact.

Which bootstrap to use: Λ(t) is a function of XᵀX. The pairs bootstrap resamples X, so every
resample has a different Λ and their equations contradict each other. The compromise is better than
Λ̂ = 0 only where the noise is large enough to spread the endpoints far apart. The residual bootstrap
leaves X fixed and resamples the targets, so all endpoints share one Λ. Once there are as many
endpoints as weights, m = 10, its estimate is exact to rounding at every σ. Use the residual
bootstrap where inputs can be fixed and targets are real numbers; elsewhere use the pairs bootstrap,
with care.

As published: data, seeds, pools of 100 endpoints, σ. Different: the residual bootstrap is shown
beside the published one. (E) Lines are medians over pools and bands their range. Around m = p = 10
the equations barely determine Λ and the error is heavy-tailed: single pools lie several times above
the rest and dominate the published mean (dotted). The published panel ends at m = 100, where the
error still falls; joining many pools to one shows the floor below it. (F) Further
draws of the data are added, with the crossover of each (ticks). Over the forty draws of the paper
preset the crossovers lie between σ ≈ 4 and σ ≈ 15, most of them above the published one near 6.
"""

from functools import partial
from itertools import product

from tacit_paper import Work, on_one_thread
from tacit_paper.bootstrap.checks import check
from tacit_paper.bootstrap.claims import CLAIMS
from tacit_paper.bootstrap.config import KINDS, PAPER, QUICK, Config
from tacit_paper.bootstrap.estimates import (
    draw_rows,
    joined_rows,
    noise_rows,
    pool_rows,
    theory_rows,
)
from tacit_paper.bootstrap.figure import plot

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "Figure 7"


def work(config: Config, device: str) -> Work:
    """The units of work, by name.

    `device` is ignored: for matrices of 1000×10 no device is faster than the CPU, where everything
    is computed in float64.
    """
    pools = product(KINDS, range(config.pools))
    units = {
        "theory": theory_rows,
        **{f"{kind} pool {k}": partial(pool_rows, kind=kind, pool=k) for kind, k in pools},
        "joined pools": joined_rows,
        **{f"sigma {sigma:g}": partial(noise_rows, sigma=sigma) for sigma in config.sigmas},
        **{f"draw {draw}": partial(draw_rows, draw=draw) for draw in range(1, config.draws + 1)},
    }
    return on_one_thread({unit: partial(rows, config) for unit, rows in units.items()})
