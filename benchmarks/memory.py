"""Peak memory of `estimate` above the model, in a process of its own."""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
from table import Row
from torch import nn
from torch.nn import functional as F
from workload import mlp, seconds

import tacit

BOUND = 6.0
WIDTHS = (6000, 5000, 3500, 700, 100, 10)
"""50,030,310 parameters, 30 million of them in the first weight."""
QUICK = (600, 500, 350, 70, 10)
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure(*, quick: bool) -> list[Row]:
    """Peak memory of a fresh process, in units of the parameters' float32 bytes."""
    widths = QUICK if quick else WIDTHS
    command = [sys.executable, __file__, "--widths", *map(str, widths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the measured process failed:\n{done.stderr}")
    found = json.loads(done.stdout)
    size = 4 * found["parameters"]
    ratio = found["peak"] / size
    return [
        Row(
            "peak memory above the model / parameters' float32 bytes",
            f"{ratio:.2f}× ({found['peak'] / 2**20:,.0f} MiB over {size / 2**20:,.0f} MiB)",
            value=ratio,
            bound=BOUND,
        ),
        Row(
            f"  {found['parameters']:,} parameters, {len(candidates())} regularizers",
            f"{found['largest'] / found['parameters']:.0%} in one tensor; {found['how']}",
        ),
        Row("  time of that estimate", f"{found['seconds']:.1f} s"),
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
    """Bytes by which resident memory rose at most, from model and data made to a fit returned."""
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
    # Libraries that torch loads at the first call are not the model's: load them now.
    small = mlp((8, 8, 8, 2))
    tacit.estimate(small, F.cross_entropy, (torch.randn(16, 8), torch.arange(16) % 2), candidates())

    before, how = _start()
    took = seconds(lambda: _run(model, data))
    return {
        "peak": _peak() - before,
        "parameters": sum(sizes),
        "largest": max(sizes),
        "seconds": took,
        "how": how,
    }


def _run(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> tacit.Fit:
    return tacit.estimate(model, F.cross_entropy, data, candidates())


def _start() -> tuple[int, str]:
    """Resident bytes now, and what the peak will be: the mark is set back where that is allowed."""
    if not STATUS.exists():
        return _peak(), "ru_maxrss over its value before"
    try:
        CLEAR.write_text("5")
    except OSError:
        return _status("VmRSS"), "VmHWM since the process began: at most too high"
    return _status("VmRSS"), "VmHWM, set back before the call"


def _peak() -> int:
    """The high-water mark of resident memory.

    Linux's ru_maxrss is not it: a child starts with its parent's.
    """
    if STATUS.exists():
        return _status("VmHWM")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def _status(field: str) -> int:
    lines = STATUS.read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(kilobytes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    torch.set_num_threads(2)
    print(json.dumps(peak_of_estimate(tuple(parser.parse_args().widths))))
