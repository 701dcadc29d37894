"""Gradients of all members are those of each member."""

import pytest
import torch
from support.ensembles import MEMBERS, ensemble_and_data
from support.models import loss_of
from torch.nn import functional as F

import tacit
from tacit import ensembles, reference


def test_gradients_match_the_dense_reference():
    ensemble, data, member_sets = ensemble_and_data()
    losses, gradients = ensembles.gradients(ensemble, F.mse_loss, data)
    for m, member_set in enumerate(member_sets):
        model = ensemble.module(m)
        dense = loss_of(model, F.mse_loss, member_set)
        expected = reference.gradient(dense, dict(model.named_parameters()))
        flat = torch.cat([gradients[n][m].flatten() for n in gradients])
        assert torch.allclose(flat, expected, rtol=0, atol=1e-12)
        objective = tacit.Objective(model, F.mse_loss, member_set)
        assert float(losses[m]) == pytest.approx(objective.value(), rel=1e-12)


def test_gradients_do_not_depend_on_how_the_data_is_sliced(monkeypatch):
    ensemble, data, _ = ensemble_and_data()
    whole = ensembles.gradients(ensemble, F.mse_loss, data)
    monkeypatch.setattr("tacit.ensembles.evaluation.ACTIVATION_ENTRIES", 7 * 8 * MEMBERS)
    sliced = ensembles.gradients(ensemble, F.mse_loss, data)
    for name, expected in whole.gradients.items():
        assert torch.allclose(sliced.gradients[name], expected, rtol=0, atol=1e-14)
