"""Weighted means of example losses and of batches; padding that is counted as data."""

import math

import pytest
import torch
from support.models import image_data, loss_of, params_of, random_data, small_cnn, tanh_mlp
from support.objectives import IGNORED, assert_close, fit_l2, squared_errors, strength
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import InputError, Objective, reference

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


def token_model():
    """Classes of every token; rows are sequences."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 7)).double()


def token_batches(padded):
    """Sequences of ten tokens in batches of four; the last tokens of some batches are padding."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(10):
        tokens = torch.randint(0, 7, (4, 10), generator=generator)
        labels = tokens.roll(-1, 1)
        labels[:, 10 - padded * (number % 5 == 0) :] = IGNORED
        batches.append({"tokens": tokens, "labels": labels})
    return batches


def token_losses(model, batch):
    scores = model(batch["tokens"]).movedim(-1, 1)
    return F.cross_entropy(scores, batch["labels"], reduction="none").flatten()


def padding_problems(fit):
    return [p for p in fit.problems if p.kind == "objective" and "padding" in p.message]


def test_padding_that_is_counted_as_data_is_a_problem():
    model = token_model()
    fit = fit_l2(Objective.from_batch_loss(model, token_losses, token_batches(3)))
    (problem,) = padding_problems(fit)
    assert "6%" in problem.message
    assert fit.sources[0].ignored == pytest.approx(24 / 400)

    def mean_over_all(output, target):
        return F.cross_entropy(output.movedim(-1, 1), target, reduction="none").mean()

    pairs = [(batch["tokens"], batch["labels"]) for batch in token_batches(3)]
    assert len(padding_problems(fit_l2(Objective(model, mean_over_all, pairs)))) == 1

    def without_padding(model, batch):
        return token_losses(model, batch)[batch["labels"].flatten() != IGNORED]

    right = fit_l2(Objective.from_batch_loss(model, without_padding, token_batches(3)))
    assert not padding_problems(right)
    assert fit.strengths["l2"] == pytest.approx(0.94 * right.strengths["l2"], rel=1e-10)
    assert not padding_problems(
        fit_l2(Objective.from_batch_loss(model, token_losses, token_batches(0)))
    )


def test_masked_rows_are_a_problem_where_the_mask_is_in_the_target():
    X, y = random_data(0, count=64)
    mask = (torch.rand(64, 1, generator=torch.Generator().manual_seed(0)) > 0.3).double()

    def packed(output, target):
        return (target[:, 1:] * (output - target[:, :1])).square().mean()

    def in_pairs(output, target):
        return (target[1] * (output - target[0])).square().mean()

    pairs = [(a, (b, c)) for a, b, c in zip(X.split(16), y.split(16), mask.split(16), strict=True)]
    for loss, data in ((packed, (X, torch.cat([y, mask], 1))), (in_pairs, pairs)):
        fit = fit_l2(Objective(tanh_mlp(0), loss, data))
        assert len(padding_problems(fit)) == 1
        assert fit.sources[0].ignored == pytest.approx(1 - float(mask.mean()))


def test_a_first_pass_without_gradient_does_not_hide_padding():
    def mean_over_all(output, target):
        return F.cross_entropy(output.movedim(-1, 1), target, reduction="none").mean()

    pairs = [(batch["tokens"], batch["labels"]) for batch in token_batches(3)]
    objective = Objective(token_model(), mean_over_all, pairs)
    objective.value()
    assert len(padding_problems(fit_l2(objective))) == 1


def test_margins_that_are_kept_are_no_padding():
    torch.manual_seed(0)
    model, (X, _) = nn.Linear(5, 1).double(), random_data(0, count=200)
    signs = model(X).detach().sign()
    model.weight.data *= 20

    def hinge(output, target):
        return (1 - output * target).clamp(min=0).mean()

    def hinges(model, batch):
        return (1 - model(batch[0]) * batch[1]).clamp(min=0)[:, 0]

    for objective in (
        Objective(model, hinge, (X, signs)),
        Objective.from_batch_loss(model, hinges, (X, signs)),
    ):
        assert not padding_problems(fit_l2(objective))


def test_from_mean_loss_weights_batches_by_their_tokens():
    model, batches = token_model(), token_batches(7)

    def batch_mean(model, batch):
        return F.cross_entropy(model(batch["tokens"]).movedim(-1, 1), batch["labels"])

    def count(model, batch):
        return int((batch["labels"] != IGNORED).sum())

    objective = Objective.from_mean_loss(model, batch_mean, batches, count=count)
    tokens, labels = (torch.cat([batch[key] for batch in batches]) for key in ("tokens", "labels"))
    whole = batch_mean(model, {"tokens": tokens, "labels": labels})
    fit = fit_l2(objective)
    assert objective.value() == pytest.approx(whole.item(), rel=1e-12)
    assert fit.strengths["l2"] == pytest.approx(strength(model, whole), rel=1e-10)
    scores = tacit.score_examples(fit)
    assert scores.weights.tolist() == [count(model, batch) for batch in batches]
    assert scores.values.shape == (10, 1)

    counts = {
        "rows": lambda batch: len(batch["labels"]),
        "all tokens": lambda batch: batch["labels"].numel(),
        "one": lambda batch: 1,
    }
    for wrong in counts.values():
        with pytest.raises(InputError):
            Objective.from_mean_loss(model, batch_mean, batches, count=wrong).gradient()
    for wrong in (3, lambda batch: "three", lambda batch: -1, lambda batch: math.nan):
        with pytest.raises(InputError, match="count"):
            Objective.from_mean_loss(model, batch_mean, batches, count=wrong)
