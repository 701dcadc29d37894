"""What a run records of its last epochs."""

import pytest
import torch
from support.ensembles import small_networks, train_briefly
from support.models import random_data

import tacit
from tacit.ensembles import SGD, Plan


def test_a_run_records_the_last_epochs_of_every_member():
    """Members stop after different epochs; displacements of consecutive epochs add up."""
    ensemble, data = small_networks(), random_data(0)
    run = train_briefly(ensemble, data, plan=Plan(SGD(0.01), [1, 2, 4], 16, recorded_epochs=2))
    assert len(run.recorded_epochs) == 2
    trained = [(epoch.time > 0).tolist() for epoch in run.recorded_epochs]
    assert trained == [[False, True, True], [True, True, True]]
    for name, start in ensemble.params.items():
        displacement = sum(epoch.displacement[name] for epoch in run.recorded_epochs)
        expected = run.last.params[name] - start
        assert torch.allclose(displacement[:2], expected[:2], rtol=0, atol=1e-12)


def test_averaged_columns_are_zero_outside_the_scope():
    biases = tacit.smooth_l1(0.1, scope="*.bias", name="biases")
    plan = Plan(SGD(0.1), 1, 8, averaged=[biases])
    run = train_briefly(small_networks(), random_data(0), plan=plan)
    column = run.recorded_epochs[-1].columns[biases]
    assert float(column["0.weight"].abs().max()) == 0
    assert float(column["0.bias"].abs().max()) > 0


def test_families_that_cannot_be_averaged_are_refused():
    plan = Plan(SGD(0.1), 1, 8, averaged=[tacit.regularizers.diagonal()])
    with pytest.raises(tacit.InputError, match="several strengths on one tensor"):
        train_briefly(small_networks(), random_data(0), plan=plan)
