"""The example of several processes, as torchrun starts it, and the page that shows it."""

import os
import re
import subprocess
import sys

import pytest
from support.pages import ROOT

EXAMPLE = ROOT / "examples" / "sharded.py"
PAGE = ROOT / "docs" / "how-to" / "sharded.md"


def start(processes):
    """What the example prints, started by torchrun on this machine."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        str(EXAMPLE),
    ]
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""
    }  # fmt: skip
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_two_processes_recover_the_decay_and_one_of_them_prints_it():
    printed = start(2)
    ((applied, recovered),) = re.findall(r"applied (\S+), recovered (\S+) ", printed)
    assert float(recovered) == pytest.approx(float(applied), rel=0.01)
    assert printed.count("No problems found") == 1
