"""Label smoothing: every form of cross-entropy against torch's own, and what is refused."""

from functools import partial

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import techniques

X, Y = random_data(1, count=24, inputs=3)
CLASSES = torch.arange(24) % 3
WEIGHTS = torch.linspace(0.5, 2, 24, dtype=torch.float64)
MODEL = tanh_mlp(1, (3, 4, 3))
LOG_MODEL = nn.Sequential(MODEL, nn.LogSoftmax(1))
PROBABILITIES = F.one_hot(CLASSES, 3).double() * 0.7 + 0.1
BITS = (torch.arange(72).view(24, 3) % 5 > 2).double()


def assert_smoothed(smoothed, exact):
    assert smoothed.value() == pytest.approx(exact.value(), rel=1e-10)
    for name, gradient in exact.gradient().items():
        torch.testing.assert_close(smoothed.gradient()[name], gradient)


FORMS = {
    "function": (MODEL, F.cross_entropy, CLASSES),
    "module": (MODEL, nn.CrossEntropyLoss(), CLASSES),
    "lambda": (MODEL, lambda output, target: F.cross_entropy(output, target.long()), CLASSES),
    "probabilities": (MODEL, F.cross_entropy, PROBABILITIES),
}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["mean", "weighted"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_cross_entropy_is_smoothed_as_torch_does(form, weights):
    model, loss, target = FORMS[form]
    options = {"weights": weights, "batch_size": 7}
    plain = tacit.Objective(model, loss, (X, target), **options)
    torchs = partial(F.cross_entropy, label_smoothing=0.2)
    exact = tacit.Objective(model, torchs, (X, target), **options)
    assert_smoothed(techniques.label_smoothing(plain, 0.2), exact)


def test_log_probabilities_are_smoothed_as_their_logits():
    plain = tacit.Objective(LOG_MODEL, nn.NLLLoss(), (X, CLASSES))
    exact = tacit.Objective(LOG_MODEL, partial(F.cross_entropy, label_smoothing=0.2), (X, CLASSES))
    smoothed = techniques.label_smoothing(plain, 0.2)
    assert smoothed.value() == pytest.approx(exact.value(), rel=1e-12)
    for name, gradient in exact.gradient().items():
        torch.testing.assert_close(smoothed.gradient()[name], gradient)


def test_targets_of_sigmoids_are_moved_towards_one_half():
    plain = tacit.Objective(MODEL, F.binary_cross_entropy_with_logits, (X, BITS))
    exact = tacit.Objective(MODEL, F.binary_cross_entropy_with_logits, (X, 0.8 * BITS + 0.1))
    assert_smoothed(techniques.label_smoothing(plain, 0.2), exact)


def with_rare_weight(output, target):
    """Cross-entropy, except that one rare class counts double."""
    losses = F.cross_entropy(output, target.clamp_max(2), reduction="none")
    return (losses * (1 + (target == 3))).mean()


def test_a_loss_that_differs_on_a_later_batch_is_refused_there():
    target = torch.cat([torch.arange(600) % 3, torch.tensor([3, 3])])
    inputs = torch.randn(602, 3, generator=torch.Generator().manual_seed(0)).double()
    order = torch.arange(602).roll(1)  # so that the few examples of the probe have none
    data = inputs[order], target[order]
    plain = tacit.Objective(MODEL, with_rare_weight, data, batch_size=100)
    with pytest.raises(tacit.InputError, match="another value"):
        techniques.label_smoothing(plain, 0.1).gradient()


REFUSED = {
    "squared loss": (F.mse_loss, Y.expand(24, 3)),
    "smoothed already": (partial(F.cross_entropy, label_smoothing=0.1), CLASSES),
    "twice": (lambda o, t: 2 * F.cross_entropy(o, t), CLASSES),
    "absolute": (F.l1_loss, PROBABILITIES),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_losses_are_refused(case):
    loss, target = REFUSED[case]
    objective = tacit.Objective(MODEL, loss, (X, target))
    with pytest.raises(tacit.InputError, match="label_smoothing needs a loss that equals"):
        techniques.label_smoothing(objective, 0.1)


@pytest.mark.parametrize("eps", [-0.1, 1.0, float("nan"), "a"])
def test_eps_is_a_part_of_the_targets(eps):
    objective = tacit.Objective(MODEL, F.cross_entropy, (X, CLASSES))
    with pytest.raises(tacit.InputError, match="eps"):
        techniques.label_smoothing(objective, eps)


def test_smoothing_twice_is_refused():
    objective = tacit.Objective(MODEL, F.cross_entropy, (X, CLASSES))
    once = techniques.label_smoothing(objective, 0.1)
    with pytest.raises(tacit.InputError, match="label_smoothing= already"):
        techniques.label_smoothing(once, 0.1)
    fit = tacit.fit(tacit.difference_equations(once, objective, tacit.l2()))
    assert tacit.score_examples(fit).values.shape == (24, 1)


def test_an_exact_fit_of_one_output_is_no_cross_entropy():
    """Of one class the cross-entropy is zero, and so is the squared error of an exact fit."""
    model = nn.Linear(3, 1, bias=False).double()
    X = torch.eye(3).double()
    objective = tacit.Objective(model, F.mse_loss, (X, X @ model.weight.detach().T))
    with pytest.raises(tacit.InputError, match="another value"):
        techniques.label_smoothing(objective, 0.1)
