"""Time and peak memory of computations, measured in turn."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Computation(NamedTuple):
    """What is measured: compute(prepare()). Its preparation is not measured."""

    compute: Callable[[Any], Any]
    prepare: Callable[[], Any]


class Cost(NamedTuple):
    """Seconds, and bytes of peak memory above what was allocated before; no bytes on a CPU."""

    seconds: float
    peak_bytes: int | None


def measure_in_turn(
    computations: Mapping[str, Computation], *, repeats: int, device: str
) -> dict[str, Cost]:
    """The least time and the highest memory of each computation.

    All are computed once before the next repeat, so that other load on the machine meets all.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in computations}
    for _ in range(repeats):
        for name, computation in computations.items():
            costs[name].append(_measure(computation, device))
    return {name: _combine(measured) for name, measured in costs.items()}


def _measure(computation: Computation, device: str) -> Cost:
    prepared = computation.prepare()
    if device != "cuda":
        start = time.perf_counter()
        computation.compute(prepared)
        return Cost(time.perf_counter() - start, None)
    gc.collect()  # so that tensors in cycles of references are not counted
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    computation.compute(prepared)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return Cost(seconds, torch.cuda.max_memory_allocated() - before)


def _combine(costs: list[Cost]) -> Cost:
    peaks = [cost.peak_bytes for cost in costs if cost.peak_bytes is not None]
    return Cost(min(cost.seconds for cost in costs), max(peaks, default=None))


@contextmanager
def tf32_products() -> Iterator[None]:
    """Multiply float32 matrices in TF32 on a GPU."""
    earlier = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = earlier


def device_name(device: str) -> str:
    """The name of the GPU, or CPU."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"
