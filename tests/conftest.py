"""Settings for all tests, and the quick reproduction that several of them look at."""

import pytest
import torch
from typer.testing import CliRunner

from tacit.cli import app

torch.set_num_threads(1)  # matrices this small are slower on several


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory):
    """A folder whose `results` hold all experiments at their quick size."""
    folder = tmp_path_factory.mktemp("reproduced")
    command = ["reproduce", "--out", str(folder / "results"), "--device", "cpu"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert "  no " not in found.output, found.output  # every key number holds
    return folder
