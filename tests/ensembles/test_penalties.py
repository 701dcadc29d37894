"""Penalties of an ensemble refuse strengths that do not belong to its members."""

import pytest
from support.ensembles import ensemble_and_data, train_briefly
from torch.nn import functional as F

import tacit
from tacit import ensembles

REFUSED = {
    "strengths of fewer members": ({tacit.l2(): [1.0, 2.0]}, "strengths of 'l2'"),
    "text": ({tacit.l2(): "strong"}, "strength of 'l2' is 'strong'"),
    "a function that was not called": ({tacit.l2: 1.0}, "Call it"),
    "a list of penalties": ([tacit.l2()], "pass a dictionary"),
    "an empty list": ([], "pass a dictionary"),
}


@pytest.mark.parametrize(("penalties", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_penalties_are_refused_with_a_remedy(penalties, message):
    ensemble, data, _ = ensemble_and_data()
    with pytest.raises(tacit.InputError) as caught:
        train_briefly(ensemble, data, penalties=penalties)
    assert message in str(caught.value)


def test_known_penalties_with_several_strengths_are_refused():
    ensemble, data, _ = ensemble_and_data()
    known = {tacit.layerwise(tacit.l2()): 1.0}
    with pytest.raises(tacit.InputError, match="takes penalties of one strength"):
        ensembles.endpoint_equations(ensemble, F.mse_loss, data, tacit.l2(), known=known)
