"""The outputs of all members at once are those of each module."""

import pytest
import torch
from support.ensembles import ensemble_and_data, sequential, train_briefly
from support.models import random_data
from torch import nn
from torch.nn import functional as F

import tacit
from tacit import ensembles


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return self.scale * x


class LinearThenDropout(nn.Module):
    """Has dropout, but is not an nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(5, 1), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.layer(x))


def shared_activation():
    relu = nn.ReLU()
    return sequential(nn.Linear(5, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 1))


def shared_dropout():
    dropout = nn.Dropout(0.5)
    return sequential(
        nn.Linear(5, 4), nn.Tanh(), dropout, nn.Linear(4, 4), dropout, nn.Linear(4, 1)
    )


def with_hook():
    model = sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    return model


def with_unused_parameter():
    model = sequential(nn.Linear(5, 1))
    model[0].register_parameter("extra", nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    return model


@pytest.mark.parametrize(
    "build", [shared_activation, shared_dropout, with_hook, with_unused_parameter]
)
def test_unusual_models_give_the_equations_of_each_module(build):
    X, y = random_data(0)
    ensemble = ensembles.initialise(build, [0, 1])
    equations = ensembles.endpoint_equations(ensemble, F.mse_loss, (X, y), tacit.l2())
    for m in range(2):
        objective = tacit.Objective(ensemble.module(m), F.mse_loss, (X, y))
        expected = tacit.fit(tacit.endpoint_equations(objective, tacit.l2()))
        assert tacit.fit(equations[m]).strengths == pytest.approx(expected.strengths, rel=1e-9)


@pytest.mark.parametrize("dims", [(1, -1), (-2, -1), (2, 3), (2, -1), (1, 2)])
def test_flatten_counts_dimensions_as_the_module_does(dims):
    X = torch.randn(6, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ensemble = ensembles.initialise(
        lambda: sequential(nn.Flatten(*dims), nn.Identity(), Scale()), [0, 1]
    )
    outputs = ensemble.forward(ensemble.params, X.expand(2, *X.shape), None)
    assert torch.equal(outputs[1], ensemble.module(1)(X))


def test_dropout_outside_a_chain_of_layers_is_refused():
    _, data, _ = ensemble_and_data()
    ensemble = ensembles.initialise(lambda: LinearThenDropout().double(), range(5))
    with pytest.raises(tacit.InputError, match="not a chain of linear layers"):
        train_briefly(ensemble, data)
