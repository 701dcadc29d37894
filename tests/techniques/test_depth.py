"""Stochastic depth against enumeration of all masks, and what is refused."""

from itertools import product

import pytest
import torch
from support.models import random_data, tanh_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tacit
from tacit import techniques

X, Y = random_data(1, count=6, inputs=3)


class Residual(nn.Module):
    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.first, self.second = tanh_mlp(2, (3, 4, 3)), tanh_mlp(4, (3, 4, 3))
        torch.manual_seed(5)
        self.head, self.checkpointed = nn.Linear(3, 1).double(), checkpointed

    def forward(self, x):
        for branch in (self.first, self.second):
            part = checkpoint(branch, x, use_reentrant=False) if self.checkpointed else branch(x)
            x = x + part
        return self.head(x)


def test_the_mean_over_draws_approaches_that_over_all_masks():
    model, q = Residual(), 0.3
    objective = tacit.Objective(model, F.mse_loss, (X, Y), batch_size=4)
    technique = techniques.stochastic_depth(objective, q, layers=["first", "second"], draws=300)
    exact = 0.0
    for masks in product((0, 1), repeat=2):
        probability = torch.tensor([1 - q if m else q for m in masks]).prod()
        hidden = X + masks[0] / (1 - q) * model.first(X)
        hidden = hidden + masks[1] / (1 - q) * model.second(hidden)
        exact += float((probability * F.mse_loss(model.head(hidden), Y)).detach())
    assert abs(exact / objective.value() - 1) > 0.1
    assert technique.value() == pytest.approx(exact, rel=0.05)


def test_checkpointed_branches_keep_their_masks_in_the_backward_pass():
    gradients = [
        techniques.stochastic_depth(
            tacit.Objective(Residual(checkpointed=checkpointed), F.mse_loss, (X, Y)),
            0.4,
            layers=["second"],
        ).gradient()
        for checkpointed in (False, True)
    ]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_hooks_of_the_user_stay_and_those_of_the_technique_go():
    model, seen = Residual(), []
    model.second.register_forward_hook(lambda *_: seen.append(1))
    objective = tacit.Objective(model, F.mse_loss, (X, Y))
    techniques.stochastic_depth(objective, 0.4, layers="second").gradient()
    assert len(model.second._forward_hooks) == 1
    assert not model.first._forward_hooks
    seen.clear()
    plain = Residual()(X)
    assert torch.equal(model(X), plain)
    assert seen == [1]


class Shared(Residual):
    def forward(self, x):
        return self.head(x + self.first(x) + self.first(2 * x))


REFUSED = {
    "unknown": (Residual, "third", "there are first"),
    "root": (Residual, "", "names no module"),
    "none": (Residual, [], "names no module"),
    "missing": (Residual, None, "layers is None: pass the name of a module"),
    "shared": (Shared, "first", "called 2 times"),
    "unused": (Shared, "second", "called 0 times"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_without_a_meaning_are_refused(case):
    model, layers, words = REFUSED[case]
    objective = tacit.Objective(model(), F.mse_loss, (X, Y))
    with pytest.raises(tacit.InputError, match=words):
        techniques.stochastic_depth(objective, 0.2, layers=layers)


class Pooled(Residual):
    """A branch that is of the whole batch, not of single examples."""

    def forward(self, x):
        return self.head(x + self.first(x) + 0 * self.second(x.mean(1)[:, None].expand(-1, 3)[:1]))


def test_a_branch_needs_one_row_per_example():
    objective = tacit.Objective(Pooled(), F.mse_loss, (X, Y))
    with pytest.raises(tacit.InputError, match="one row per example"):
        techniques.stochastic_depth(objective, 0.2, layers="second")


def test_mixup_comes_after_stochastic_depth():
    objective = tacit.Objective(Residual(), F.mse_loss, (X, Y))
    mixed = techniques.mixup(techniques.stochastic_depth(objective, 0.2, layers="second"))
    assert mixed.count == 6
    fit = tacit.fit(tacit.difference_equations(mixed, objective, tacit.l2()))
    assert fit.strengths
