"""Plans and stopping rules refuse settings that make no sense."""

import pytest
import torch
from support.models import random_data

import tacit
from tacit.ensembles import SGD, Plan, Stopping

REFUSED = {
    "an optimizer of torch": (lambda: Plan(torch.optim.SGD, 1, 8), "pass ensembles.SGD(rate)"),
    "a number as stopping rule": (lambda: Plan(SGD(0.1), 1, 8, 5), "pass ensembles.Stopping"),
    "one regularizer instead of a list": (
        lambda: Plan(SGD(0.1), 1, 8, averaged=tacit.l2()),
        "pass a list of regularizers",
    ),
    "no epochs": (lambda: Plan(SGD(0.1), 0, 1), "epochs is 0"),
    "no examples in a batch": (lambda: Plan(SGD(0.1), 1, 0), "batch_size is 0"),
    "no recorded epochs": (
        lambda: Plan(SGD(0.1), 1, 8, recorded_epochs=0),
        "recorded_epochs is 0",
    ),
    "no patience": (lambda: Stopping(0), "patience is 0"),
    "NaN as min_delta": (lambda: Stopping(3, min_delta=float("nan")), "min_delta is nan"),
    "an unknown monitor": (lambda: Stopping(1, monitor="accuracy"), "monitor is 'accuracy'"),
    "validation data without its monitor": (
        lambda: Stopping(1, monitor="loss", validation=random_data(0)),
        "neither",
    ),
    "the monitor without validation data": (
        lambda: Stopping(1, monitor="validation"),
        "validation data missing",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_settings_are_refused_with_a_remedy(call, message):
    with pytest.raises(tacit.InputError) as caught:
        call()
    assert message in str(caught.value)
