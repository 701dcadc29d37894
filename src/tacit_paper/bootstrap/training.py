"""Resamples of a data set, and training on all of them at once."""

from typing import NamedTuple

import torch
from torch import Tensor

from tacit_paper import least_squares as ls
from tacit_paper.bootstrap.config import Config, Kind


class Resamples(NamedTuple):
    """Inputs (m×n×p) and observations (m×n×r) of a pool; the first is the data set itself."""

    X: Tensor
    Y: Tensor


class Endpoints(NamedTuple):
    """Weights (m×p×r) at which training on each resample stopped, and the loss gradient there."""

    thetas: Tensor
    gradients: Tensor


def resample(X: Tensor, Y: Tensor, config: Config, *, kind: Kind, pool: int) -> Resamples:
    """The data set itself and the resamples of a pool, for every column of Y (n×r).

    The pairs bootstrap draws rows of (X, Y). The residual bootstrap leaves X fixed and adds to the
    fitted values Xθ̂ the residuals of the drawn rows, where θ̂ are the early-stopped weights.
    """
    indices = [torch.arange(len(X))]
    for k in range(1, config.size):
        seed = ls.endpoint_seed(pool, k, config.resampling_seed)
        generator = torch.Generator().manual_seed(seed)
        indices.append(torch.randint(len(X), (len(X),), generator=generator))
    drawn = torch.stack(indices)
    if kind == "pairs":
        return Resamples(X[drawn], Y[drawn])
    fitted = X @ train(Resamples(X[None], Y[None]), config).thetas[0]
    return Resamples(X.expand(len(drawn), -1, -1), fitted + (Y - fitted)[drawn])


def train(samples: Resamples, config: Config) -> Endpoints:
    """Descend from zero on all resamples at once.

    A step θ += η (Xᵀy/n − (XᵀX/n) θ) needs only XᵀX/n and Xᵀy/n, so it costs p² and not np.
    """
    scaled = samples.X.mT / samples.X.shape[1]
    gram, moment = scaled @ samples.X, scaled @ samples.Y
    thetas = torch.zeros_like(moment)
    for _ in range(config.stop):
        thetas = thetas + config.step * (moment - gram @ thetas)
    return Endpoints(thetas, 2 * (gram @ thetas - moment))
