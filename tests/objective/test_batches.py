"""Batches are read more than once, in any order, and only a few examples are probed."""

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch.nn import functional as F

import tacit


class ReadOnce:
    """Makes a new iterator every time, over batches that are there only once."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __iter__(self):
        yield from self.batches


class Shuffled:
    """Starts again every time, in a new order."""

    def __init__(self, batches):
        self.batches, self.generator = batches, torch.Generator().manual_seed(0)

    def __iter__(self):
        for i in torch.randperm(len(self.batches), generator=self.generator).tolist():
            yield self.batches[i]


def test_batches_that_can_be_read_only_once_are_refused_and_shuffled_ones_are_not():
    X, y = random_data(1, count=50)
    batches = list(zip(X.split(10), y.split(10), strict=True))
    with pytest.raises(tacit.InputError, match="only once"):
        tacit.Objective(tanh_mlp(1), F.mse_loss, ReadOnce(batches))
    shuffled = tacit.Objective(tanh_mlp(1), F.mse_loss, Shuffled(batches))
    assert shuffled.count == 50


def test_large_batches_are_probed_on_a_few_examples():
    batch_sizes = []
    model, (X, y) = tanh_mlp(11), random_data(11, count=5000)
    model.register_forward_hook(lambda module, inputs, output: batch_sizes.append(len(output)))
    tacit.Objective(model, F.mse_loss, [(X, y)])
    assert max(batch_sizes) <= 256
