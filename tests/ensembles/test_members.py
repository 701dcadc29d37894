"""Ensembles are made only of modules that differ in nothing but their parameters."""

import types

import pytest
import torch
from support.ensembles import small_networks
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import ensembles


def linear_with_mask(mask):
    model = nn.Linear(3, 1)
    model.register_buffer("mask", torch.tensor(mask))
    return model


def patched(model, how):
    if how == "method":
        model.forward = types.MethodType(lambda self, x: F.linear(x, self.weight), model)
    else:
        model.forward = lambda x: F.linear(x, model.weight)
    return model


def hooked(model):
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def test_select_keeps_the_members_in_the_requested_order():
    ensemble = small_networks(3)
    selected = ensemble.select([2, 0])
    assert len(selected) == 2
    for name, stacked in ensemble.params.items():
        assert torch.equal(selected.params[name], stacked[[2, 0]])


def test_modules_and_their_ensemble_have_the_same_weights():
    ensemble = small_networks(3)
    again = ensembles.from_models([ensemble.module(m) for m in range(3)])
    for name, stacked in ensemble.params.items():
        assert torch.equal(again.params[name], stacked)


REFUSED = {
    "no modules": (lambda: ensembles.from_models([]), "modules of one architecture"),
    "two architectures": (
        lambda: ensembles.from_models([nn.Linear(1, 2), nn.Linear(2, 1)]),
        "another architecture",
    ),
    "one patched forward": (
        lambda: ensembles.from_models([nn.Linear(1, 1), patched(nn.Linear(1, 1), "method")]),
        "another architecture",
    ),
    "one hook": (
        lambda: ensembles.from_models([nn.Linear(1, 1), hooked(nn.Linear(1, 1))]),
        "another architecture",
    ),
    "a forward that a copy would share": (
        lambda: ensembles.from_models([patched(nn.Linear(1, 1), "closure")]),
        "types.MethodType",
    ),
    "batch normalisation": (
        lambda: ensembles.from_models([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]),
        "buffer",
    ),
    "buffers that differ": (
        lambda: ensembles.from_models(
            [linear_with_mask([True, False]), linear_with_mask([True, True])]
        ),
        "another buffer 'mask'",
    ),
    "frozen parameters": (
        lambda: ensembles.from_models([nn.Linear(2, 2).requires_grad_(False)]),
        "no trainable",
    ),
    "a negative seed": (
        lambda: ensembles.initialise(lambda: nn.Linear(1, 1), [-1]),
        "a seed is -1",
    ),
    "parameters of another model": (
        lambda: ensembles.Ensemble(nn.Linear(1, 1), {"weight": torch.ones(2, 1, 1)}),
        "do not belong",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_an_ensemble_is_refused(call, message):
    with pytest.raises(tacit.InputError, match=message):
        call()
