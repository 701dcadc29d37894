"""Terms of one batch: losses without curvature or second derivatives, and random signs."""

import pytest
import torch
from support.dense_dropout import class_data, dropout_mlp, flat_gradient
from support.models import params_of
from torch.nn import functional as F

import tacit
from tacit.regularizers import explicit_dropout
from tacit.regularizers.dropout.layers import DropoutLayer, LayerCall
from tacit.regularizers.dropout.terms import random_signs


@pytest.mark.parametrize("samples", [None, 2])
def test_a_loss_that_is_linear_in_the_outputs_has_no_penalty(samples):
    model = dropout_mlp(0)

    def linear(z, y):
        return z.gather(1, y[:, None]).mean()

    penalty = explicit_dropout(tacit.Objective(model, linear, class_data()), samples=samples)
    assert float(penalty.value(params_of(model))) == 0
    assert not flat_gradient(penalty, params_of(model)).any()


def test_a_loss_without_double_backward_is_refused_with_a_remedy():
    model = dropout_mlp(0)
    penalty = explicit_dropout(tacit.Objective(model, F.multi_margin_loss, class_data()))
    with pytest.raises(tacit.InputError, match=r"double backward.*differentiable backward"):
        penalty.value(params_of(model))


def test_random_signs_are_plus_and_minus_one_and_differ_between_calls_and_draws():
    calls = [LayerCall(DropoutLayer("drop", 0), torch.zeros(40, 3)) for _ in range(2)]
    first, second = random_signs(calls, (0, 0, 0))
    assert set(first.unique().tolist()) == {-1.0, 1.0}
    assert not torch.equal(first, second)
    assert torch.equal(first, random_signs(calls, (0, 0, 0))[0])
    assert not torch.equal(first, random_signs(calls, (0, 0, 1))[0])
