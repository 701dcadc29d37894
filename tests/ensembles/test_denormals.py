"""Denormal numbers are flushed while an ensemble trains, and the setting is restored after."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tacit import ensembles
from tacit.ensembles import SGD, Plan

SCRIPT = """
import torch
from torch.nn import functional as F
from tacit import ensembles
from tacit.ensembles.denormals import flushed_denormals, flushes_denormals

torch.set_num_threads(2)

def fraction_not_flushed():  # over all threads
    denormals = torch.full((2_000_000,), 1e-39)
    return float((denormals * 1 != 0).float().mean())

flushed = []
def loss(outputs, targets):
    if len(outputs) == 6:  # a batch of training, but no part of the data that is checked before
        flushed.append(flushes_denormals())
    return F.mse_loss(outputs, targets)

def train():
    ensemble = ensembles.initialise(lambda: torch.nn.Linear(2, 1), [0, 1])
    plan = ensembles.Plan(ensembles.SGD(0.1), 1, 6)
    ensembles.train(ensemble, loss, (torch.randn(9, 2), torch.randn(9, 1)), plan, seeds=[0, 1])

with flushed_denormals():
    assert fraction_not_flushed() == 0.0
assert fraction_not_flushed() == 1.0
train()
assert flushed and all(flushed)
assert fraction_not_flushed() == 1.0
torch.set_flush_denormal(True)
train()
assert flushes_denormals()
"""


@pytest.mark.slow
def test_denormals_are_flushed_while_training_and_the_setting_is_restored():
    """In a separate process, because torch's threads inherit the setting when they are created."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def test_the_setting_is_restored_after_an_error():
    def loss(outputs, targets):
        if len(outputs) == 6:  # a batch of training, but no part of the data that is checked before
            raise RuntimeError("stop")
        return outputs.square().mean()

    ensemble, data = ensembles.initialise(lambda: nn.Linear(3, 2), [0]), (torch.ones(9, 3),) * 2
    with pytest.raises(RuntimeError, match="stop"):
        ensembles.train(ensemble, loss, data, Plan(SGD(0.1), 1, 6), seeds=[0])
    assert (torch.tensor(1e-39) * 1 != 0).item()
