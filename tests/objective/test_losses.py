"""Weighted means of example losses, from weights= and from a batch loss."""

import pytest
import torch
from support.models import image_data, loss_of, params_of, random_data, small_cnn, tanh_mlp
from support.objectives import assert_close, squared_errors
from torch.nn import functional as F

from tacit import Objective, reference

WEIGHTED = {
    "weights of tensors": lambda model, X, y, w: Objective(
        model, F.mse_loss, (X, y), weights=w, batch_size=5
    ),
    "weights of tensors with a batch loss": lambda model, X, y, w: Objective.from_batch_loss(
        model, squared_errors, {"x": X, "y": y}, weights=w, batch_size=5
    ),
    "weights from a batch loss": lambda model, X, y, w: Objective.from_batch_loss(
        model, lambda m, b: (squared_errors(m, b), b["w"]), {"x": X, "y": y, "w": w}, batch_size=5
    ),
}


@pytest.mark.parametrize("make_objective", WEIGHTED.values(), ids=WEIGHTED)
def test_weights_make_a_weighted_mean(make_objective):
    model, (X, y) = tanh_mlp(0), random_data(1, count=32)
    w = torch.rand(32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    w[5:10] = 0  # a whole batch
    objective = make_objective(model, X, y, w)

    def weighted_mean(output, target):
        return (w * (output - target).square()[:, 0]).sum() / w.sum()

    dense_loss = loss_of(model, weighted_mean, (X, y))
    assert objective.value() == pytest.approx(float(dense_loss(params_of(model))), rel=1e-12)
    expected = reference.gradient(dense_loss, params_of(model))
    assert_close(objective.gradient(), expected, tolerance=1e-12)


@pytest.mark.parametrize("make_objective", WEIGHTED.values(), ids=WEIGHTED)
def test_integer_weights_equal_duplicated_examples(make_objective):
    model, (X, y) = tanh_mlp(0), random_data(1, count=32)
    counts = torch.arange(32) % 4
    repeated = (X.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0))
    expected = Objective(model, F.mse_loss, repeated).gradient()
    assert_close(make_objective(model, X, y, counts).gradient(), expected, tolerance=1e-12)


def test_weights_work_with_class_targets():
    model, (X, y) = small_cnn(0), image_data(1)
    w = torch.arange(1, 61).double() / 7
    options = {"weights": w, "batch_size": 16, "batch_norm": "running"}
    objective = Objective(model, F.cross_entropy, (X, y), **options)
    losses = F.cross_entropy(model(X), y, reduction="none")
    expected = ((w * losses).sum() / w.sum()).item()
    assert objective.value() == pytest.approx(expected, rel=1e-12)
