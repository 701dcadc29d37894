"""Settings for all tests, and the quick reproduction of all figures that several tests read."""

import os

import pytest
import torch
from typer.testing import CliRunner

from tacit.cli import build_app

# Matrices this small take longer on several threads, and two workers share two cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Divide tests among parallel workers such that no shared fixture is made twice.

    The tests that use `reproduced` are one group and every other file is a group. The longest
    groups come first: `reproduced`, then files with slow tests. Serial runs keep their order.
    """
    if not hasattr(config, "workerinput"):
        return
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}

    def uses_reproduced(item):
        return "reproduced" in getattr(item, "fixturenames", ())

    for item in items:
        group = "reproduced" if uses_reproduced(item) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: (not uses_reproduced(item), item.path not in slow_files))


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory):
    """A folder whose `results` hold all experiments at their quick preset."""
    folder = tmp_path_factory.mktemp("reproduced")
    command = ["reproduce", "--out", str(folder / "results"), "--device", "cpu"]
    run = CliRunner().invoke(build_app(), command)
    assert run.exit_code == 0, run.output
    assert "  no " not in run.output, run.output  # every key number holds
    return folder
