"""What an estimate costs: time and memory by parameters, examples and candidates

A decoder like GPT-2 with random weights. (A) Seconds per batch of one plain gradient pass (grey),
of an estimate with two candidates, and with one strength per layer; labels are in plain passes. (B)
Peak memory above the model, with gradients added up in float64 (the default) or in float32. (C)
Time by the number of tokens: part of an estimate does not grow with the data. (D) Time by the
number of candidates.

A plain pass is `batch_loss(model, batch).mean().backward()` over all batches, gradients added up in
`.grad`. All computations of a unit alternate with it, after a warm-up, and the least of two times
is taken. Each starts from a new `Objective`; what `Objective` checks when it is made is in the
rows as `objective_seconds`. An estimate is `fit(endpoint_equations(objective, [l2(),
smooth_l1(1e-3)]))`. Its fixed part follows from its times on two numbers of batches.

Memory is the peak that torch allocates above the model and the data. A plain pass holds the
gradient in the model's dtype. On a GPU, products of float32 matrices are in TF32. The largest model
computes its activations again in the backward pass, and is measured on few batches, so that the
fixed part is a large part of its time.

The strengths of every size are compared with naive ones, from the normal equations of the plain
pass's gradients. The rows also have the cost of a difference over eight dropout masks, and of the
scores of all tokens.

Not in the paper, which says nothing about cost. The quick preset has small models on any device;
its times, of milliseconds, say little, and on a CPU memory is not measured.
"""

from functools import partial

from tacit_paper import Claim, Work, on_one_thread
from tacit_paper.scaling.checks import check
from tacit_paper.scaling.config import PAPER, QUICK, Config
from tacit_paper.scaling.estimates import (
    batch_rows,
    candidate_rows,
    difference_rows,
    largest_rows,
    size_rows,
)
from tacit_paper.scaling.figure import plot

__all__ = ["CLAIMS", "FIGURE", "PAPER", "QUICK", "Config", "check", "plot", "work"]

FIGURE = "New"
CLAIMS: tuple[Claim, ...] = ()


def work(config: Config, device: str) -> Work:
    """One unit per size and dtype, then units that vary batches, candidates and the computation."""
    units: Work = {}
    for size in config.sizes:
        for dtype in config.dtypes:
            units[f"{size.name}, {dtype}"] = partial(size_rows, config, size, dtype, device)
    if config.largest is not None:
        units["largest"] = partial(largest_rows, config, device)
    units["batches"] = partial(batch_rows, config, config.dtypes[0], device)
    units["candidates"] = partial(candidate_rows, config, config.dtypes[0], device)
    for dtype in config.dtypes:
        units[f"difference, {dtype}"] = partial(difference_rows, config, dtype, device)
    return on_one_thread(units)
