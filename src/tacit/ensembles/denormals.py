"""Flushing of denormal numbers, which cost a CPU about ten ordinary multiplications each."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARALLEL_ENTRIES = 2**15
"""Number of entries from which torch splits an operation among its threads."""


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat denormal numbers as zero on the CPU, and restore the previous setting on exit.

    Strong penalties drive weights and momenta into the denormal range, where training is several
    times slower.
    """
    previous = flushes_denormals()
    # A thread inherits the setting at its creation and keeps it, so create all threads first.
    torch.ones(PARALLEL_ENTRIES * torch.get_num_threads()).add_(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(previous)


def flushes_denormals() -> bool:
    """Whether this thread treats denormal numbers as zero, which torch has no function for."""
    return bool((torch.tensor(1e-39, dtype=torch.float32) * 1 == 0).item())
