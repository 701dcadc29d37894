"""Networks trained with the penalty λ₁ Σ|θ| itself, whose strength the paper did not recover.

SGD steps along the subgradient λ₁ sign(θ). A weight that the penalty holds at zero does not stay
there: it jumps across zero by about ηλ₁ at every step. Its sign at one point is then noise, and
only the mean of its sign over many steps is the subgradient that balances the loss.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch.nn import functional as F

from tacit import ensembles, l1, l2
from tacit.ensembles import Run
from tacit_paper import Row
from tacit_paper.elastic_net.config import Config
from tacit_paper.elastic_net.estimates import fit_columns, published_columns
from tacit_paper.elastic_net.training import Member, Sweep

ZERO_WIDTH = 0.01
"""Weights up to this part of the largest one are left out in the estimate `nonsmooth nonzero`."""


def nonsmooth_rows(config: Config, device: str) -> Iterator[Row]:
    """Four rows per network: as published, and exact in three ways.

    `nonsmooth last` has the signs of the last weights, `nonsmooth nonzero` only those of weights
    away from zero, and `nonsmooth drift` the mean signs over each of the last epochs.
    """
    cells = product(config.nonsmooth, range(config.seeds))
    sweep = Sweep(config, [Member(*cell, seed) for cell, seed in cells], device, smooth=False)
    run = sweep.train()
    last, drift = sweep.fits(run)
    nonzero = ensembles.fits(
        ensembles.endpoint_equations(
            run.last, F.mse_loss, sweep.data, [l1(zero_width=ZERO_WIDTH), l2()]
        )
    )
    published, crossing = published_columns(sweep, run, last), crossing_share(run)
    for m, member in enumerate(sweep.members):
        network = {
            "optimizer": "sgd",
            "epochs": int(run.epochs[m]),
            **vars(member),
            "crossing": float(crossing[m]),
        }
        yield {**network, "estimate": "nonsmooth published", **published[m]}
        yield {**network, "estimate": "nonsmooth last", **fit_columns(last[m])}
        yield {**network, "estimate": "nonsmooth nonzero", **fit_columns(nonzero[m])}
        yield {**network, "estimate": "nonsmooth drift", **fit_columns(drift[m])}


def crossing_share(run: Run) -> torch.Tensor:
    """The share of each network's weights that had both signs within the last epoch."""
    (mean_signs,) = run.recorded_epochs[-1].columns.values()
    return (run.last.flatten(mean_signs).abs() < 1).double().mean(1)
