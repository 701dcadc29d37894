"""The network, data and regularizers shared by the benchmarks, and a timer."""

import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

import tacit

WIDTHS = (784, 256, 256, 256, 10)
EXAMPLES = 54_000


def mlp(widths: tuple[int, ...] = WIDTHS, *, seed: int = 0) -> nn.Sequential:
    """A ReLU network of these widths in float32, with torch's default initialisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    hidden = [module for layer in layers[:-1] for module in (layer, nn.ReLU())]
    return nn.Sequential(*hidden, layers[-1])


def classification_data(
    count: int, *, separation: float = 0.0, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Gaussian inputs of ten classes, with means `separation` standard deviations from zero."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(WIDTHS[-1], (count,), generator=generator)
    inputs = torch.randn(count, WIDTHS[0], generator=generator)
    means = torch.randn(WIDTHS[-1], WIDTHS[0], generator=generator)
    means *= separation / means.norm(dim=1, keepdim=True)
    return inputs + means[targets], targets


def elastic_net() -> list[tacit.Regularizer]:
    """The two candidates of the timings: ridge, and the lasso smoothed with β = 1e-3."""
    return [tacit.l2(), tacit.smooth_l1(1e-3)]


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
