"""All benchmarks in one run, as one table; the exit status says whether the bounds held."""

import argparse
import platform
import sys

import memory
import passes
import published
import scores
import sweep
import torch
from table import render

THREADS = 2
QUICK_NOTE = "Quick sizes, to show that it runs: bounds are printed but not enforced."


def main() -> int:
    """Measure, print, and say how many bounds were missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, bounds not enforced")
    quick = parser.parse_args().quick
    torch.set_num_threads(THREADS)
    print(
        f"tacit benchmarks: torch {torch.__version__}, {THREADS} threads, float32 on the CPU "
        f"({platform.machine()})"
    )
    if quick:
        print(QUICK_NOTE)
    print(flush=True)
    modules = (passes, scores, sweep, published, memory)
    rows = [row for module in modules for row in module.measure(quick=quick)]
    print(render(rows, enforced=not quick))
    missed = 0 if quick else sum(not row.held for row in rows)
    if missed:
        print(f"\n{missed} of the bounds missed.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
