"""Numbers too small for full precision, which cost a CPU ten times an ordinary multiplication."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

GRAIN = 2**15
"""Entries from which torch shares an operation among its threads."""


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Count denormal numbers as zero on the CPU, and restore the setting after.

    Strong penalties drive weights and momenta there, and training then slows down several times.
    """
    before = flushing()
    # Threads made while flushing is on would keep it for good, so all are made before.
    torch.ones(GRAIN * torch.get_num_threads()).add_(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def flushing() -> bool:
    """Whether denormal numbers count as zero in this thread; torch has no way to ask."""
    return bool((torch.tensor(1e-39, dtype=torch.float32) * 1 == 0).item())
