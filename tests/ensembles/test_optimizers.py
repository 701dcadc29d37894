"""Optimizers refuse step sizes, momenta and schedules that make no sense."""

import pytest
from support.ensembles import ensemble_and_data, train_briefly

import tacit
from tacit.ensembles import SGD, Plan


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (-1.0, "rate is -1.0"),
        ([1.0, 2.0], "one for each of the 5 members"),
        ("fast", "rate is 'fast'"),
        (True, "rate is True"),
        ([1.0, 1.0, 1.0, 1.0, True], "rate is [1.0, 1.0, 1.0, 1.0, True]"),
        ([0.1, 0.1, 0.1, 0.1, float("nan")], "rate is [0.1, 0.1, 0.1, 0.1, nan]"),
    ],
)
def test_wrong_step_sizes_are_refused(rate, message):
    ensemble, data, _ = ensemble_and_data()
    with pytest.raises(tacit.InputError) as caught:
        train_briefly(ensemble, data, plan=Plan(SGD(rate), 1, 8))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"milestones": 3}, "milestones is 3"),
        ({"factor": -1}, "factor is -1"),
    ],
)
def test_wrong_momenta_and_schedules_are_refused(options, message):
    with pytest.raises(tacit.InputError, match=message):
        SGD(0.1, **options)
