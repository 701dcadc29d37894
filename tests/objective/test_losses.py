"""A loss that is not a mean over examples is refused, wherever in the data it shows."""

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit

CLASS_WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]).double())


def sorted_classes(count=900):
    X, _ = random_data(3, count=count)
    return X, torch.arange(3).repeat_interleave(count // 3)


def test_a_sum_reduced_loss_is_refused_with_weights_too():
    X, y = random_data(2, outputs=3)
    model = tanh_mlp(2, (5, 8, 3))
    with pytest.raises(tacit.InputError, match=r"not a mean over examples|sum-reduced"):
        tacit.Objective(model, nn.MSELoss(reduction="sum"), (X, y), weights=torch.ones(len(X)))


def test_class_weights_are_refused_however_the_labels_are_sorted():
    model, (X, y) = tanh_mlp(3, (5, 8, 3)), sorted_classes()
    with pytest.raises(tacit.InputError, match="class weights"):
        tacit.Objective(model, CLASS_WEIGHTED, (X, y))
    batches = list(zip(X.split(100), y.split(100), strict=True))
    objective = tacit.Objective(model, CLASS_WEIGHTED, batches)  # each batch is of one class
    with pytest.raises(tacit.InputError, match="class weights"):
        objective.gradient()


def test_padding_that_occurs_only_in_later_batches_is_refused():
    model, (X, y) = tanh_mlp(4, (5, 8, 3)), sorted_classes()
    y = torch.where((torch.arange(900) > 400) & (torch.arange(900) % 2 == 0), -100, y)
    batches = list(zip(X.split(100), y.split(100), strict=True))
    objective = tacit.Objective(model, F.cross_entropy, batches)
    with pytest.raises(tacit.InputError, match="ignored tokens"):
        objective.value()
