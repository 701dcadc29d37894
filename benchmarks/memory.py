"""Peak memory of `estimate` above the model, measured in a separate process."""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
from table import Row
from torch.nn import functional as F
from workload import mlp, seconds

import tacit

BOUND = 4.0
SECONDS_BOUND = 5.0
"""For two threads of the machine that the other bounds were set on."""
WIDTHS = (6000, 5000, 3500, 700, 100, 10)
"""50,030,310 parameters, 30 million of them in the first weight."""
QUICK_WIDTHS = (600, 500, 350, 70, 10)
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(*, quick: bool) -> list[Row]:
    """Peak memory of a fresh process, in units of the parameters' float32 bytes."""
    widths = QUICK_WIDTHS if quick else WIDTHS
    command = [sys.executable, __file__, "--widths", *map(str, widths)]
    command += ["--threads", str(torch.get_num_threads())]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"the measured process failed:\n{process.stderr}")
    measured = json.loads(process.stdout)
    size = 4 * measured["parameters"]
    ratio = measured["peak"] / size
    largest = measured["largest"] / measured["parameters"]
    return [
        Row(
            "peak memory above the model / parameters' float32 bytes",
            f"{ratio:.2f}× ({measured['peak'] / 2**20:,.0f} MiB over {size / 2**20:,.0f} MiB)",
            value=ratio,
            bound=BOUND,
        ),
        Row(
            f"  {measured['parameters']:,} parameters, {len(candidates())} regularizers",
            f"{largest:.0%} in one tensor; {measured['method']}",
        ),
        Row(
            "  time of this estimate",
            f"{measured['seconds']:.1f} s",
            value=measured["seconds"],
            bound=SECONDS_BOUND,
        ),
    ]


def candidates() -> list[tacit.Regularizer]:
    """Eight elementwise or layer-wise families."""
    return [
        tacit.l1(),
        tacit.l2(scope="*.bias", name="l2 of biases"),
        tacit.l2(scope="0", name="l2 of the first layer"),
        tacit.smooth_l1(1e-3, name="smooth_l1(0.001)"),
        tacit.smooth_l1(3e-3, name="smooth_l1(0.003)"),
        tacit.smooth_l1(1e-2, name="smooth_l1(0.01)"),
        tacit.layerwise(tacit.l2(scope="*.weight")),
        tacit.layerwise(tacit.smooth_l1(5e-3)),
    ]


def peak_of_estimate(widths: tuple[int, ...]) -> dict[str, float | str]:
    """Increase of resident memory, at its peak, over that with model and data in memory."""
    batch = 64
    model = mlp(widths)
    generator = torch.Generator().manual_seed(0)
    data = [
        (
            torch.randn(batch, widths[0], generator=generator),
            torch.randint(widths[-1], (batch,), generator=generator),
        )
        for _ in range(2)
    ]
    sizes = [p.numel() for p in model.parameters()]
    # A first call, so that libraries that torch loads lazily are not counted.
    warm_up = mlp((8, 8, 8, 2))
    inputs, targets = torch.randn(16, 8), torch.arange(16) % 2
    tacit.estimate(warm_up, F.cross_entropy, (inputs, targets), candidates())

    before, method = _reset_peak()
    elapsed = seconds(lambda: tacit.estimate(model, F.cross_entropy, data, candidates()))
    return {
        "peak": _peak() - before,
        "parameters": sum(sizes),
        "largest": max(sizes),
        "seconds": elapsed,
        "method": method,
    }


def _reset_peak() -> tuple[int, str]:
    """Reset the peak where the system allows it; current bytes, and how the peak is measured."""
    if not STATUS.exists():
        return _peak(), "ru_maxrss minus its value before"
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return _status("VmRSS"), "VmHWM since the process started: an upper bound"
    return _status("VmRSS"), "VmHWM, reset before the call"


def _peak() -> int:
    """Peak of resident memory in bytes.

    Trap: on Linux ru_maxrss is not usable, because a child process starts with its parent's value.
    """
    if STATUS.exists():
        return _status("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = STATUS.read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(kilobytes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(peak_of_estimate(tuple(arguments.widths))))
