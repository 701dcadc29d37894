"""Implicit regularization due to early stopping

Gradient descent on least squares, stopped after t steps, minimises loss plus θᵀΛ(t)θ. (A) Λ(500)
from theory. (B, B′) Estimated from m endpoints that stop at t = 500, exact from m = 10. (C, C′) A
diagonal penalty from one endpoint reproduces the weights, but is not the diagonal of Λ. (D)
Endpoints that stop at different steps share no Λ: the error levels off. (E) A single strength
equals the Rayleigh quotient θᵀΛθ/θᵀθ; the published curve is tr(Λ)/p.

(B′) With fewer than p endpoints the equations do not determine Λ, so no estimator can be exact.
Training in float32 gives four correct digits. (C) Retraining reproduces the stopped weights by
construction (10 equations, 10 unknowns). This does not make the diagonal matrix a penalty: in about
three of four data sets it has a negative entry. Where XᵀX/n + diag(Λ̂) is not positive definite, the
penalised loss has no minimum, and the certificate rejects the estimate. (D) A falling error that
does not vanish is misspecification; different stops add no information. (E) The later training
stops, the more λ̂ depends on the particular training examples; at t = 500 its interval contains
zero.

Bands are 95 % intervals. In B′ and D they cover training: Student's t over pools of endpoints. In E
they cover sampling: the range of λ̂ on another thousand examples at the same weights.

As published: data, seeds, pools, step size, checkpoints and Adam's settings. Different: the step is
θ += (η/n)Xᵀ(y − Xθ), for which the formula is exact. B′ and C′ are additions; the published C draws
weights and diagonals in one panel. (D) The text counts any decrease of the loss as an improvement.
With that rule 24 of 25 runs in float64 never stop, and runs in float32 stop near step 960, where
the decrease reaches the rounding error. The published curve requires a minimum improvement of
0.001. The panel shows all three. (E) The curve is the exact least-squares strength. Dots show the
published Adam fit.
"""

from functools import partial

from tacit_paper import Work, on_one_thread
from tacit_paper.early_stopping.checks import check
from tacit_paper.early_stopping.claims import CLAIMS
from tacit_paper.early_stopping.config import PAPER, QUICK, Config
from tacit_paper.early_stopping.estimates import (
    dataset_rows,
    diagonal_rows,
    fixed_pool_rows,
    scalar_rows,
    theory_rows,
    variable_pool_rows,
)
from tacit_paper.early_stopping.figure import plot

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "Figure 4"


def work(config: Config, device: str) -> Work:
    """The units of work, by name.

    `device` is ignored: for matrices of 1000×10 no device is faster than the CPU, where everything
    is computed in float64.
    """
    starts = range(0, config.datasets, config.datasets_per_unit)
    pools = range(config.pools)
    units = {
        "theory": theory_rows,
        "diagonal": diagonal_rows,
        **{f"datasets from {start}": partial(dataset_rows, start=start) for start in starts},
        **{f"fixed pool {pool}": partial(fixed_pool_rows, pool=pool) for pool in pools},
        **{f"variable pool {pool}": partial(variable_pool_rows, pool=pool) for pool in pools},
        "trace": scalar_rows,
    }
    return on_one_thread({unit: partial(rows, config) for unit, rows in units.items()})
