"""Every function of an ensemble refuses arguments that would give a plausible wrong number."""

import pytest
import torch
from support.ensembles import ensemble_and_data, sequential, small_networks, train_briefly
from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import ensembles

NOT_MEANS = {
    "sum-reduced": lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum"),
    "not a mean over examples": lambda outputs, targets: F.cross_entropy(
        outputs, targets, weight=torch.tensor([1.0, 5.0]).to(outputs)
    ),
    "reduction='mean'": lambda outputs, targets: F.cross_entropy(
        outputs, targets, reduction="none"
    ),
}


@pytest.mark.parametrize(("message", "loss"), NOT_MEANS.items(), ids=NOT_MEANS.keys())
def test_every_function_refuses_a_loss_that_is_not_a_mean(message, loss):
    X, _ = random_data(0)
    data = X, (X[:, 0] > 0).long()
    ensemble = ensembles.initialise(lambda: sequential(nn.Linear(5, 2), nn.Dropout(0.1)), [0, 1])
    calls = (
        lambda: ensembles.gradients(ensemble, loss, data),
        lambda: ensembles.endpoint_equations(ensemble, loss, data, tacit.l2()),
        lambda: train_briefly(ensemble, data, loss=loss),
        lambda: ensembles.dropout_equations(
            ensemble, loss, data, tacit.l2(), dropout=0.1, seeds=[0, 1]
        ),
    )
    for call in calls:
        with pytest.raises(tacit.InputError, match=message):
            call()


def test_targets_that_broadcast_are_refused():
    X, y = random_data(0)
    ensemble = ensembles.initialise(lambda: sequential(nn.Linear(5, 1)), [0])
    with pytest.raises(tacit.InputError, match="broadcast"):
        train_briefly(ensemble, (X, y[:, 0]))


REFUSED = {
    "a module instead of an ensemble": (
        lambda ensemble, data: ensembles.gradients(nn.Linear(2, 1), F.mse_loss, data),
        "an ensemble is a Linear",
    ),
    "no loss": (
        lambda ensemble, data: train_briefly(ensemble, data, loss=None),
        "the loss is a NoneType",
    ),
    "inputs of the wrong width": (
        lambda ensemble, data: train_briefly(ensemble, (data[0][:, :3], data[1])),
        "model and loss fail on inputs of shape (64, 3)",
    ),
    "dropout without layers": (
        lambda ensemble, data: train_briefly(ensemble, data, dropout=0.1),
        "no nn.Dropout layer",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_arguments_are_refused_with_a_remedy(call, message):
    with pytest.raises(tacit.InputError) as caught:
        call(small_networks(), random_data(0))
    assert message in str(caught.value)


@pytest.mark.parametrize("rate", [1.0, True])
def test_a_dropout_rate_of_one_is_refused(rate):
    ensemble, data, _ = ensemble_and_data()
    with pytest.raises(
        tacit.InputError, match=rf"dropout is {rate}: .* each of the {len(ensemble)} members"
    ):
        train_briefly(ensemble, data, dropout=rate)
