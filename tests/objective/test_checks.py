"""Objectives that are not deterministic, or not means over examples, are refused early."""

import random

import pytest
import torch
from support.models import random_data, tanh_mlp
from support.objectives import dropout_objective, split_batches
from torch import nn
from torch.nn import functional as F

from tacit import InputError, Objective

CLASS_WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double())


def sorted_classes(count=900):
    X, _ = random_data(3, count=count)
    return X, torch.arange(3).repeat_interleave(count // 3)


def test_a_sum_reduced_loss_is_refused_with_weights_too():
    X, y = random_data(2, outputs=3)
    model = tanh_mlp(2, (5, 8, 3))
    with pytest.raises(InputError, match=r"not a mean over examples|sum-reduced"):
        Objective(model, nn.MSELoss(reduction="sum"), (X, y), weights=torch.ones(len(X)))


def test_class_weights_are_refused_however_the_labels_are_sorted():
    model, (X, y) = tanh_mlp(3, (5, 8, 3)), sorted_classes()
    with pytest.raises(InputError, match="class weights"):
        Objective(model, CLASS_WEIGHTED, (X, y))
    batches = split_batches(X, y, size=100)
    objective = Objective(model, CLASS_WEIGHTED, batches)  # each batch is of one class
    with pytest.raises(InputError, match="class weights"):
        objective.gradient()


def test_padding_that_occurs_only_in_later_batches_is_refused():
    model, (X, y) = tanh_mlp(4, (5, 8, 3)), sorted_classes()
    y = torch.where((torch.arange(900) > 400) & (torch.arange(900) % 2 == 0), -100, y)
    batches = split_batches(X, y, size=100)
    objective = Objective(model, F.cross_entropy, batches)
    with pytest.raises(InputError, match="ignored tokens"):
        objective.value()


def test_large_batches_are_probed_on_a_few_examples():
    batch_sizes = []
    model, (X, y) = tanh_mlp(11), random_data(11, count=5000)
    model.register_forward_hook(lambda module, inputs, output: batch_sizes.append(len(output)))
    Objective(model, F.mse_loss, [(X, y)])
    assert max(batch_sizes) <= 256


def test_dropout_called_as_a_function_is_refused_in_eval_and_averaged_in_training():
    class FunctionalDropout(nn.Linear):
        def forward(self, x):
            return super().forward(F.dropout(x))

    torch.manual_seed(0)
    model, data = FunctionalDropout(5, 1).double(), random_data(1)
    with pytest.raises(InputError, match=r"not deterministic.*dropout.*training=True"):
        Objective(model, F.mse_loss, data)
    values = [dropout_objective(data, model=model).value() for _ in range(2)]
    assert values[0] == values[1]


def test_noise_that_torchs_seed_does_not_control_is_refused_in_training_too():
    class PythonNoise(nn.Linear):
        def forward(self, x):
            return super().forward(x) + random.random()

    with pytest.raises(InputError, match=r"not deterministic.*torch's seed does not control"):
        dropout_objective(random_data(1), model=PythonNoise(5, 1).double())
