"""Difference equations of dropout refuse what has no effect to estimate."""

import pytest
from support.ensembles import sequential, small_networks
from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import ensembles


def networks_with_dropout():
    return ensembles.initialise(
        lambda: sequential(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 1)), [0, 1]
    )


def write(ensemble, dropout):
    return ensembles.dropout_equations(
        ensemble, F.mse_loss, random_data(0), tacit.l2(), dropout=dropout, seeds=[0, 1]
    )


@pytest.mark.slow
def test_members_that_reach_the_noise_first_stop_drawing_and_change_no_other_member():
    ensemble, data = networks_with_dropout(), random_data(0)
    together = ensembles.dropout_equations(
        ensemble, F.mse_loss, data, tacit.l2(), dropout=[0.5, 0.2], seeds=[0, 1], noise=0.1
    )
    assert together.draws[0] < together.draws[1]
    assert max(together.noise) <= 0.1
    for m, rate in enumerate((0.5, 0.2)):
        separate = ensembles.dropout_equations(
            ensemble.select([m]), F.mse_loss, data, tacit.l2(), dropout=rate, seeds=[m], noise=0.1
        )
        assert separate.draws == [together.draws[m]]
        assert tacit.fit(together.equations[m]).strengths == pytest.approx(
            tacit.fit(separate.equations[0]).strengths, rel=1e-9
        )


def test_a_rate_of_zero_is_refused():
    with pytest.raises(tacit.InputError, match="leave out such members"):
        write(networks_with_dropout(), [0.0, 0.1])


def test_a_model_without_dropout_layers_is_refused():
    with pytest.raises(tacit.InputError, match=r"no nn\.Dropout layer"):
        write(small_networks(2), 0.1)
