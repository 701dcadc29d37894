"""Run all benchmarks and print one table; the exit status is 1 if a bound was exceeded."""

import argparse
import platform
import sys

import dropout
import memory
import passes
import processes
import published
import scores
import sweep
import torch
import watching
from table import render

THREADS = 2
"""Of a run whose bounds are enforced; quick sizes take one."""
QUICK_NOTE = "Quick sizes, only to check that everything runs: bounds are not enforced."


def main() -> int:
    """Measure, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, bounds not enforced")
    quick = parser.parse_args().quick
    threads = 1 if quick else THREADS
    torch.set_num_threads(threads)
    print(
        f"tacit benchmarks: torch {torch.__version__}, threads: {threads}, float32 on the CPU "
        f"({platform.machine()})"
    )
    if quick:
        print(QUICK_NOTE)
    print(flush=True)
    modules = (passes, scores, sweep, published, dropout, memory, watching, processes)
    rows = [row for module in modules for row in module.measure(quick=quick)]
    print(render(rows, enforced=not quick))
    exceeded = 0 if quick else sum(not row.within_bound for row in rows)
    if exceeded:
        print(f"\n{exceeded} bounds were exceeded.")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
