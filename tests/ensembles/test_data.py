"""Data of an ensemble is checked against its members."""

import pytest
import torch
from support.ensembles import ensemble_and_data, train_briefly

import tacit
from tacit.ensembles import Data

REFUSED = {
    "text": (lambda ensemble, data: train_briefly(ensemble, "x"), "data is a str"),
    "no examples": (
        lambda ensemble, data: train_briefly(ensemble, (torch.ones(0, 5), torch.ones(0, 1))),
        "data is empty",
    ),
    "too few members": (
        lambda ensemble, data: train_briefly(ensemble, Data(data.inputs, data.targets, [0, 1])),
        "3 sets and an assignment of shape (2,)",
    ),
    "a set that does not exist": (
        lambda ensemble, data: train_briefly(
            ensemble, Data(data.inputs, data.targets, [0, 1, 2, 3, 0])
        ),
        "pass assignment=",
    ),
    "fractional indices": (
        lambda ensemble, data: train_briefly(ensemble, Data(data.inputs, data.targets, [0.0] * 5)),
        "pass assignment=",
    ),
    "NaN": (
        lambda ensemble, data: train_briefly(
            ensemble, (data.inputs[0] * torch.nan, data.targets[0])
        ),
        "NaN",
    ),
    "fewer targets than inputs": (
        lambda ensemble, data: Data(data.inputs, data.targets[:, :3]),
        "must begin with (sets, examples)",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_data_is_refused_with_a_remedy(call, message):
    ensemble, data, _ = ensemble_and_data()
    with pytest.raises(tacit.InputError) as caught:
        call(ensemble, data)
    assert message in str(caught.value)
