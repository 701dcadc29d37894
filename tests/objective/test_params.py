"""Tied parameters count once, and frozen parameters are constants."""

import pytest
import torch
from support.models import loss_of, params_of, random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import Objective, reference
from tacit.objective.params import fingerprint


class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 3), nn.Linear(3, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x)))


def test_tied_weights_count_once():
    torch.manual_seed(0)
    model, x = TiedEmbedding().double(), torch.arange(18) % 6
    gradient = Objective(model, F.cross_entropy, (x, (x + 1) % 6), batch_size=5).gradient()
    F.cross_entropy(model(x), (x + 1) % 6).backward()
    assert list(gradient) == ["embedding.weight", "head.bias"]
    for name, tensor in gradient.items():
        torch.testing.assert_close(tensor, model.get_parameter(name).grad, rtol=1e-12, atol=1e-15)


def test_tied_weights_may_be_passed_under_all_their_names_if_these_agree():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    model[2].weight = model[0].weight
    X, _ = random_data(9)
    objective = Objective(model, F.mse_loss, (X, X))
    params = {n: p + 0.1 for n, p in model.state_dict().items()}
    assert "2.weight" in params
    assert objective.value(params) != objective.value()
    params["2.weight"] = params["2.weight"] + 1
    with pytest.raises(tacit.InputError, match=r"unknown 2\.weight"):
        objective.value(params)


def test_frozen_parameters_have_no_gradient_but_take_part_in_the_model():
    model, data = tanh_mlp(0), random_data(1)
    model[0].weight.requires_grad_(False)
    gradient = Objective(model, F.mse_loss, data).gradient()
    assert list(gradient) == ["0.bias", "2.weight", "2.bias"]
    expected = reference.gradient(loss_of(model, F.mse_loss, data), params_of(model))
    torch.testing.assert_close(reference.flat(gradient), expected, rtol=1e-12, atol=1e-15)


def test_frozen_parameters_may_be_passed_only_with_the_models_values():
    model = tanh_mlp(1)
    model[0].requires_grad_(False)
    objective = Objective(model, F.mse_loss, random_data(31))
    params = {n: p.clone() for n, p in model.named_parameters()}
    assert objective.value(params) == objective.value()
    params["0.bias"] += 1
    with pytest.raises(tacit.InputError, match=r"unknown 0\.bias"):
        objective.value(params)


def test_a_fingerprint_changes_with_any_entry_and_with_their_order():
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(2**16 + 5, generator=generator)
    before = fingerprint({"w": tensor})
    assert fingerprint({"w": tensor.clone()}) == before
    changed, permuted, across = tensor.clone(), tensor.clone(), tensor.clone()
    changed[-1] += 1e-3
    permuted[[0, 1]] = permuted[[1, 0]]
    across[[0, 2**14]] = across[[2**14, 0]]  # between two slices
    for other in (changed, permuted, across):
        assert fingerprint({"w": other}) != before


def test_a_fingerprint_does_not_depend_on_the_number_of_threads():
    tensor = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    fingerprints = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            fingerprints.add(fingerprint({"w": tensor}))
    finally:
        torch.set_num_threads(threads)
    assert len(fingerprints) == 1
