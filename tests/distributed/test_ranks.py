"""What processes send each other."""

import pickle

import torch

from tacit.objective import ranks


def test_a_view_travels_without_the_rest_of_its_memory():
    data = torch.arange(100_000.0)
    packed = ranks._packed({"batch": (data[10:20], data[:6].view(2, 3).T), "name": "first"})
    assert len(packed) < 2000
    received = pickle.loads(packed)
    assert torch.equal(received["batch"][0], data[10:20])
    assert torch.equal(received["batch"][1], data[:6].view(2, 3).T)
